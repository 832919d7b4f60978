//! Command lines as Go's `flag` package reads them, brought into the form clap reads.
//!
//! Deployments of the Go manager write `-leader-election=false` or `--num-reconciles 5`. The rules differ from
//! clap's in four points, all settled here before clap sees the words:
//!
//! - one dash is as good as two;
//! - a boolean flag never takes the next word as its value (`--flag`, `--flag=false`, not `--flag false`); Go ends
//!   parsing at that word and silently ignores all that follows, which here is an error;
//! - any other flag takes the next word, even one that begins with a dash;
//! - booleans are written in any way `strconv.ParseBool` knows, durations as for `time.ParseDuration`.
//!
//! The texts of errors are Go's too.

use std::collections::BTreeMap;
use std::time::Duration;

/// Whether a flag takes the next word as its value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Value only after `=`; without it, true.
    Bool,
    /// Value after `=` or in the next word.
    Value,
}

/// Why a command line is not one Go would accept.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum SyntaxError {
    /// A word such as `---x` or `-=x`.
    #[error("bad flag syntax: {0}")]
    BadSyntax(String),
    /// No such flag.
    #[error("flag provided but not defined: -{0}")]
    Undefined(String),
    /// A flag at the end of the line that lacks its value.
    #[error("flag needs an argument: -{0}")]
    NeedsArgument(String),
    /// A boolean followed by its value as a word of its own.
    #[error("unexpected argument {value:?}: a boolean flag takes its value as -{flag}={value}")]
    DetachedBool {
        /// The flag.
        flag: String,
        /// The word after it.
        value: String,
    },
}

/// Rewrites the words after the program's name to `--name=value`; from the first word that is no flag they are
/// passed on as they are.
pub(crate) fn normalise(
    words: impl IntoIterator<Item = String>,
    flags: &BTreeMap<String, Kind>,
) -> Result<Vec<String>, SyntaxError> {
    let mut words = words.into_iter();
    let mut out = Vec::new();
    let mut bare_bool: Option<String> = None;
    while let Some(word) = words.next() {
        let Some(body) = word.strip_prefix("--").or_else(|| word.strip_prefix('-')) else {
            if let Some(flag) = bare_bool.filter(|_| parse_bool(&word).is_ok()) {
                return Err(SyntaxError::DetachedBool { flag, value: word });
            }
            out.push(word);
            out.extend(words);
            return Ok(out);
        };
        bare_bool = None;
        if word == "--" || word == "-" {
            out.push(word);
            out.extend(words);
            return Ok(out);
        }
        if body.starts_with(['-', '=']) {
            return Err(SyntaxError::BadSyntax(word));
        }
        let (name, value) = body
            .split_once('=')
            .map_or((body, None), |(name, value)| (name, Some(value.to_owned())));
        if matches!(name, "h" | "help") {
            out.push("--help".to_owned());
            continue;
        }
        let kind = flags
            .get(name)
            .ok_or_else(|| SyntaxError::Undefined(name.to_owned()))?;
        let value = match (kind, value) {
            (_, Some(value)) => value,
            (Kind::Bool, None) => {
                bare_bool = Some(name.to_owned());
                "true".to_owned()
            }
            (Kind::Value, None) => words
                .next()
                .ok_or_else(|| SyntaxError::NeedsArgument(name.to_owned()))?,
        };
        out.push(format!("--{name}={value}"));
    }
    Ok(out)
}

/// A boolean in any form `strconv.ParseBool` accepts.
pub(crate) fn parse_bool(text: &str) -> Result<bool, &'static str> {
    match text {
        "1" | "t" | "T" | "true" | "TRUE" | "True" => Ok(true),
        "0" | "f" | "F" | "false" | "FALSE" | "False" => Ok(false),
        _ => Err("parse error"),
    }
}

/// A span of time in the form of Go's `time.ParseDuration`: `10m`, `1h30m`, `1.5s`, `200ms`, `0`.
///
/// A negative span is refused: no flag of ours has a use for one.
pub(crate) fn parse_duration(text: &str) -> Result<Duration, &'static str> {
    const INVALID: &str = "parse error";
    let negative = text.starts_with('-');
    let mut rest = text.strip_prefix(['-', '+']).unwrap_or(text);
    if rest == "0" {
        return Ok(Duration::ZERO);
    }
    if rest.is_empty() {
        return Err(INVALID);
    }
    let mut nanos: u128 = 0;
    while !rest.is_empty() {
        let (whole, after) = split_digits(rest);
        let (fraction, after) = match after.strip_prefix('.') {
            Some(after) => split_digits(after),
            None => ("", after),
        };
        if whole.is_empty() && fraction.is_empty() {
            return Err(INVALID);
        }
        let end = after
            .find(|c: char| c == '.' || c.is_ascii_digit())
            .unwrap_or(after.len());
        let (unit, after) = after.split_at(end);
        let unit: u128 = match unit {
            "ns" => 1,
            "us" | "µs" | "μs" => 1_000,
            "ms" => 1_000_000,
            "s" => 1_000_000_000,
            "m" => 60_000_000_000,
            "h" => 3_600_000_000_000,
            _ => return Err(INVALID),
        };
        let whole: u64 = if whole.is_empty() {
            0
        } else {
            whole.parse().map_err(|_| INVALID)?
        };
        nanos += u128::from(whole) * unit;
        // Digits past the 18th are worth less than a nanosecond even in hours.
        let (mut numerator, mut denominator) = (0_u128, 1_u128);
        for digit in fraction.bytes().take(18) {
            numerator = numerator * 10 + u128::from(digit - b'0');
            denominator *= 10;
        }
        nanos += unit * numerator / denominator;
        if nanos > i64::MAX.unsigned_abs().into() {
            return Err(INVALID);
        }
        rest = after;
    }
    if negative && nanos > 0 {
        return Err("must not be negative");
    }
    u64::try_from(nanos)
        .map(Duration::from_nanos)
        .map_err(|_| INVALID)
}

fn split_digits(text: &str) -> (&str, &str) {
    text.split_at(text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(line: &str) -> Result<String, String> {
        let flags = BTreeMap::from([("le".to_owned(), Kind::Bool), ("n".to_owned(), Kind::Value)]);
        normalise(
            line.split(' ').filter(|word| !word.is_empty()).map(str::to_owned),
            &flags,
        )
        .map(|words| words.join(" "))
        .map_err(|error| error.to_string())
    }

    #[test]
    fn go_forms() {
        for (line, expected) in [
            ("", Ok("")),
            ("-le", Ok("--le=true")),
            ("--le", Ok("--le=true")),
            ("-le=false --le=T", Ok("--le=false --le=T")),
            ("-le=", Ok("--le=")),
            ("-n 5", Ok("--n=5")),
            ("--n 5 -le", Ok("--n=5 --le=true")),
            ("-n -5", Ok("--n=-5")),
            ("-n --le", Ok("--n=--le")),
            ("-n=a=b", Ok("--n=a=b")),
            ("-n=", Ok("--n=")),
            ("-le crds -x", Ok("--le=true crds -x")),
            ("-le -- -x", Ok("--le=true -- -x")),
            ("-", Ok("-")),
            ("-h", Ok("--help")),
            ("-help", Ok("--help")),
            ("-n", Err("flag needs an argument: -n")),
            ("--x=1", Err("flag provided but not defined: -x")),
            ("---n", Err("bad flag syntax: ---n")),
            ("-=1", Err("bad flag syntax: -=1")),
            (
                "-le false -n 1",
                Err("unexpected argument \"false\": a boolean flag takes its value as -le=false"),
            ),
        ] {
            assert_eq!(
                run(line),
                expected.map(str::to_owned).map_err(str::to_owned),
                "{line}"
            );
        }
    }

    #[test]
    fn durations() {
        for (text, nanos) in [
            ("0", 0),
            ("0s", 0),
            ("-0", 0),
            ("10m", 600_000_000_000),
            ("1h30m", 5_400_000_000_000),
            ("1.5s", 1_500_000_000),
            (".5s", 500_000_000),
            ("1.s", 1_000_000_000),
            ("+15s", 15_000_000_000),
            ("200ms", 200_000_000),
            ("3us2ns", 3_002),
            ("1µs", 1_000),
            ("1μs", 1_000),
            ("0.3333333333333333333h", 1_199_999_999_999),
            ("2562047h47m16.854775807s", i64::MAX.unsigned_abs()),
        ] {
            assert_eq!(parse_duration(text), Ok(Duration::from_nanos(nanos)), "{text}");
        }
        for text in [
            "",
            "-",
            "+",
            "10",
            "m",
            "1x",
            "1 s",
            ".s",
            "1.2.3s",
            "2562047h47m16.854775808s",
            "99999999999999999999h",
        ] {
            assert_eq!(parse_duration(text), Err("parse error"), "{text}");
        }
        assert_eq!(parse_duration("-1s"), Err("must not be negative"));
    }

    proptest::proptest! {
        #[test]
        fn duration_never_panics(text in "[-+0-9.hmsnuµ ]{0,24}") {
            let _ = parse_duration(&text);
        }
    }
}
