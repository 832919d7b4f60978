//! What is answered to a review.

use json_patch::PatchOperation;

use super::review::Review;
use crate::api::FieldError;

/// Most characters of the reasons that are logged.
const LOGGED: usize = 4000;
/// Most faults that are told in one answer; a Status is stored nowhere, but read by people.
const MAX_CAUSES: usize = 100;

/// An answer.
#[derive(Clone, Debug, PartialEq)]
pub enum Verdict {
    /// It may be stored, with these changes.
    Allowed {
        /// Changes to make first; none when empty.
        patch: Vec<PatchOperation>,
        /// What the user is told all the same.
        warnings: Vec<String>,
    },
    /// It may not.
    Refused {
        /// Why not.
        refusal: Refusal,
        /// What the user is told besides.
        warnings: Vec<String>,
    },
}

/// What rules have found.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Findings {
    /// What has to be mended first.
    pub faults: Vec<FieldError>,
    /// What works, but hurts.
    pub warnings: Vec<String>,
}

/// Why an object is refused, as the API server's own answer would say it.
#[derive(Clone, Debug, PartialEq)]
pub struct Refusal {
    /// HTTP status.
    pub code: u16,
    /// `reason` of the Status.
    pub reason: &'static str,
    /// Why, unless `causes` say it.
    pub text: String,
    /// Every fault, with the field it is at.
    pub causes: Vec<FieldError>,
}

impl Verdict {
    /// Nothing to say against it.
    #[must_use]
    pub const fn allowed() -> Self {
        Self::allowed_with(Vec::new())
    }

    /// Nothing to say against it, but something about it.
    #[must_use]
    pub const fn allowed_with(warnings: Vec<String>) -> Self {
        Self::Allowed {
            patch: Vec::new(),
            warnings,
        }
    }

    /// Refused for these faults (422); allowed if there are none.
    #[must_use]
    pub fn invalid(mut causes: Vec<FieldError>, mut warnings: Vec<String>) -> Self {
        if causes.is_empty() {
            return Self::allowed_with(warnings);
        }
        if causes.len() > MAX_CAUSES {
            warnings.push(format!("{} more faults are not shown", causes.len() - MAX_CAUSES));
            causes.truncate(MAX_CAUSES);
        }
        Self::Refused {
            refusal: Refusal {
                code: 422,
                reason: "Invalid",
                text: String::new(),
                causes,
            },
            warnings,
        }
    }

    /// Refused because the state of the cluster forbids it (403).
    #[must_use]
    pub fn forbidden(text: impl Into<String>) -> Self {
        Self::refused(403, "Forbidden", text)
    }

    /// Refused because it cannot be told now whether it may be (503); it should be tried again.
    #[must_use]
    pub fn unavailable(text: impl Into<String>) -> Self {
        Self::refused(503, "ServiceUnavailable", text)
    }

    /// Refused because it is no question for us (400).
    #[must_use]
    pub fn bad_request(text: impl Into<String>) -> Self {
        Self::refused(400, "BadRequest", text)
    }

    fn refused(code: u16, reason: &'static str, text: impl Into<String>) -> Self {
        Self::Refused {
            refusal: Refusal {
                code,
                reason,
                text: text.into(),
                causes: Vec::new(),
            },
            warnings: Vec::new(),
        }
    }
}

impl Refusal {
    /// The text a user sees: that of the API server's Invalid error when there are causes.
    #[must_use]
    pub fn message(&self, review: &Review) -> String {
        let causes: Vec<_> = self.causes.iter().map(ToString::to_string).collect();
        let causes = match causes.as_slice() {
            [] => return self.text.clone(),
            [one] => one.clone(),
            many => format!("[{}]", many.join(", ")),
        };
        format!(
            "{}.{} {:?} is invalid: {causes}",
            review.kind, review.group, review.name
        )
    }

    /// Why, for the log: fields and kinds of faults, without the values that stand in them.
    #[must_use]
    pub fn reasons(&self) -> String {
        if self.causes.is_empty() {
            return self.text.clone();
        }
        let causes = self.causes.iter().map(|cause| {
            let kind = cause.message.split(':').next().unwrap_or_default();
            format!("{}: {kind}", cause.field)
        });
        causes
            .collect::<Vec<_>>()
            .join(", ")
            .chars()
            .take(LOGGED)
            .collect()
    }
}
