//! What names may be.

/// Longest name of an object.
const MAX_NAME: usize = 253;
/// Longest part of a name in DNS (RFC 1123 label).
pub const MAX_LABEL: usize = 63;

/// Whether an object of any kind used here can have this name (RFC 1123 subdomain, as apimachinery has it). What can be
/// no name must not become part of a request either: it may say more than a name there.
#[must_use]
pub fn is_object_name(text: &str) -> bool {
    text.len() <= MAX_NAME && text.split('.').all(is_part)
}

/// Whether a text is a name in DNS, of which each part is bounded, too.
#[must_use]
pub fn is_dns_name(text: &str) -> bool {
    text.len() <= MAX_NAME && text.split('.').all(is_dns_label)
}

/// Whether a text can be one part of a name in DNS, as names of namespaces and Services have to be.
#[must_use]
pub fn is_dns_label(text: &str) -> bool {
    text.len() <= MAX_LABEL && is_part(text)
}

fn is_part(part: &str) -> bool {
    !part.is_empty()
        && !part.starts_with('-')
        && !part.ends_with('-')
        && part
            .bytes()
            .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names() {
        for (name, good) in [
            ("cluster.local", true),
            ("a", true),
            ("a-1.b", true),
            ("", false),
            (".a", false),
            ("a.", false),
            ("-a", false),
            ("a_b", false),
            ("A", false),
            ("a?watch=true", false),
            ("a/status", false),
            ("..", false),
            ("a%2fb", false),
            ("\u{e9}", false),
        ] {
            assert_eq!((is_object_name(name), is_dns_name(name)), (good, good), "{name}");
        }
        assert!(is_dns_label("a-1") && !is_dns_label("a.b") && !is_dns_label(""));
        let long = "a".repeat(64);
        assert!(is_object_name(&long) && !is_dns_name(&long));
        assert!(!is_object_name(&"a".repeat(254)));
    }
}
