//! Amounts, as `resource.Quantity` reads them.

use serde_json::Value;

/// The amount that `value` says: a decimal number with a suffix or an exponent. `None` if it says none.
///
/// As a float, which is exact for all that is compared here: two ways to write the same amount are equal.
pub(super) fn quantity(value: &Value) -> Option<f64> {
    let text = match value {
        Value::Number(number) => return number.as_f64(),
        Value::String(text) => text,
        _ => return None,
    };
    let (sign, text) = match text.strip_prefix('-') {
        Some(rest) => (-1.0, rest),
        None => (1.0, text.strip_prefix('+').unwrap_or(text)),
    };
    let end = text
        .find(|c: char| !c.is_ascii_digit() && c != '.')
        .unwrap_or(text.len());
    let (digits, suffix) = text.split_at(end);
    let number: f64 = digits.parse().ok()?;
    let factor = match suffix {
        "n" => 1e-9,
        "u" => 1e-6,
        "m" => 1e-3,
        "" => 1.0,
        "k" => 1e3,
        "M" => 1e6,
        "G" => 1e9,
        "T" => 1e12,
        "P" => 1e15,
        "E" => 1e18,
        "Ki" => 2f64.powi(10),
        "Mi" => 2f64.powi(20),
        "Gi" => 2f64.powi(30),
        "Ti" => 2f64.powi(40),
        "Pi" => 2f64.powi(50),
        "Ei" => 2f64.powi(60),
        exponent => {
            let exponent: i32 = exponent.strip_prefix(['e', 'E'])?.parse().ok()?;
            10f64.powi(exponent)
        }
    };
    Some(sign * number * factor)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_is_read() {
        for (text, amount) in [
            ("1", 1.0),
            ("0.5", 0.5),
            (".5", 0.5),
            ("5.", 5.0),
            ("-1", -1.0),
            ("+1", 1.0),
            ("100m", 0.1),
            ("1k", 1000.0),
            ("2e3", 2000.0),
            ("2E-3", 0.002),
            ("1E", 1e18),
        ] {
            let read = quantity(&text.into()).expect(text);
            assert!((read - amount).abs() <= amount.abs() * 1e-12, "{text}: {read}");
        }
        for (one, other) in [
            ("1Gi", "1024Mi"),
            ("1Ki", "1024"),
            ("1Ei", "1024Pi"),
            ("1000M", "1G"),
            ("2", "2.0"),
        ] {
            assert_eq!(quantity(&one.into()), quantity(&other.into()));
        }
        for bad in [
            "", ".", "x", "1x", "1 ", "1.2.3", "m", "1KI", "1e", "1e+", "--1", "1mm", "inf", "NaN",
        ] {
            assert_eq!(quantity(&bad.into()), None, "{bad}");
        }
        assert_eq!(quantity(&json!(1.5)), Some(1.5));
        assert_eq!(quantity(&json!(null)), None);
    }
}
