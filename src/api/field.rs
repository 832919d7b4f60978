//! What is wrong with a field, in the words and codes of the API server.
//!
//! The texts are those of apimachinery's `field.Error`, so that an answer of ours reads like one of the API server's
//! own, in `kubectl apply` and to programs that look at `status.details.causes`.

use std::fmt;

use serde_json::Value;

/// Most characters of a value that are shown back.
const SHOWN: usize = 120;

/// One fault, at one field.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {message}")]
pub struct FieldError {
    /// Path of the field, as in `spec.etcd.statefulset.spec.template.spec.containers[0].image`.
    pub field: String,
    /// The kind of fault.
    pub reason: FieldErrorReason,
    /// What is wrong, without the path, as in `Required value: must be "v1"`.
    pub message: String,
}

/// Kinds of faults (`CauseType` of meta/v1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FieldErrorReason {
    /// There should be a value and is none.
    Required,
    /// The value has the wrong form.
    Invalid,
    /// The value is none of those that are allowed.
    NotSupported,
    /// There may be no such value here, or it may not change.
    Forbidden,
    /// A value that may be there once is there twice.
    Duplicate,
}

impl FieldErrorReason {
    /// The value on the wire.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Required => "FieldValueRequired",
            Self::Invalid => "FieldValueInvalid",
            Self::NotSupported => "FieldValueNotSupported",
            Self::Forbidden => "FieldValueForbidden",
            Self::Duplicate => "FieldValueDuplicate",
        }
    }

    /// The kind that is called `text` on the wire. What is unknown counts as invalid.
    #[must_use]
    pub fn parse(text: &str) -> Self {
        [
            Self::Required,
            Self::NotSupported,
            Self::Forbidden,
            Self::Duplicate,
        ]
        .into_iter()
        .find(|reason| reason.as_str() == text)
        .unwrap_or(Self::Invalid)
    }
}

impl FieldError {
    /// There is no value at `field`, and there has to be one; `detail` says which.
    #[must_use]
    pub fn required(field: impl Into<String>, detail: impl fmt::Display) -> Self {
        Self::new(
            field,
            FieldErrorReason::Required,
            format!("Required value: {detail}"),
        )
    }

    /// The value at `field` will not do; `detail` says what would.
    #[must_use]
    pub fn invalid(field: impl Into<String>, value: &Value, detail: impl fmt::Display) -> Self {
        Self::new(
            field,
            FieldErrorReason::Invalid,
            format!("Invalid value: {}: {detail}", shown(value)),
        )
    }

    /// The value at `field` is none of `supported`.
    #[must_use]
    pub fn not_supported(field: impl Into<String>, value: &Value, supported: &[&str]) -> Self {
        let supported: Vec<_> = supported.iter().map(|value| format!("{value:?}")).collect();
        Self::new(
            field,
            FieldErrorReason::NotSupported,
            format!(
                "Unsupported value: {}: supported values: {}",
                shown(value),
                supported.join(", ")
            ),
        )
    }

    /// What stands at `field` may not; `detail` says why.
    #[must_use]
    pub fn forbidden(field: impl Into<String>, detail: impl fmt::Display) -> Self {
        Self::new(field, FieldErrorReason::Forbidden, format!("Forbidden: {detail}"))
    }

    /// The value at `field` is there a second time.
    #[must_use]
    pub fn duplicate(field: impl Into<String>, value: &Value) -> Self {
        Self::new(
            field,
            FieldErrorReason::Duplicate,
            format!("Duplicate value: {}", shown(value)),
        )
    }

    /// A fault in words of its own.
    #[must_use]
    pub fn new(field: impl Into<String>, reason: FieldErrorReason, message: impl Into<String>) -> Self {
        Self {
            field: field.into(),
            reason,
            message: message.into(),
        }
    }
}

/// A value as the API server shows it: a text in quotes, all else as JSON; shortened.
fn shown(value: &Value) -> String {
    shortened(&value.to_string(), SHOWN)
}

/// `text`, cut after so many characters.
pub(crate) fn shortened(text: &str, most: usize) -> String {
    match text.char_indices().nth(most) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn texts_are_those_of_the_api_server() {
        let cases = [
            (
                FieldError::required("a.b", "must be \"v1\""),
                "a.b: Required value: must be \"v1\"",
            ),
            (
                FieldError::invalid("a", &json!(70000), "must be between 1 and 65535, inclusive"),
                "a: Invalid value: 70000: must be between 1 and 65535, inclusive",
            ),
            (
                FieldError::not_supported("a", &json!("apps/v1"), &["v1"]),
                "a: Unsupported value: \"apps/v1\": supported values: \"v1\"",
            ),
            (
                FieldError::forbidden("a", "may not change"),
                "a: Forbidden: may not change",
            ),
            (
                FieldError::duplicate("a[1].name", &json!("c")),
                "a[1].name: Duplicate value: \"c\"",
            ),
        ];
        for (error, text) in cases {
            assert_eq!(error.to_string(), text);
            assert_eq!(FieldErrorReason::parse(error.reason.as_str()), error.reason);
        }
    }

    #[test]
    fn long_values_are_cut() {
        let error = FieldError::invalid("a", &json!("é".repeat(1000)), "x");
        assert!(error.message.len() < 300 && error.message.contains("...: x"));
    }
}
