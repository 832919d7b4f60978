//! Bytes as text.

use std::fmt::Write as _;

/// `bytes` in lower-case hex.
pub(crate) fn encode(bytes: impl AsRef<[u8]>) -> String {
    bytes.as_ref().iter().fold(String::new(), |mut text, byte| {
        // Writing to a String cannot fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}
