//! What can go wrong in a pass, by what is to be done about it.

use std::time::Duration;

use crate::client::{CallError, is_misshapen};
use crate::pki::PkiError;

/// Why a pass ended early.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The API server refused the content of a request. The same request will be refused again.
    #[error("cannot {what}: the API server refuses it: {message}")]
    Refused {
        /// What was tried, on which object.
        what: String,
        /// The API server's reason.
        message: String,
    },
    /// Somebody else wrote the object, or made it first.
    #[error("cannot {what}: it was changed meanwhile")]
    Conflict {
        /// What was tried, on which object.
        what: String,
    },
    /// The API server could not be reached, is overloaded, or denies what the manager's role should allow.
    #[error("cannot {what}: {source}")]
    Api {
        /// What was tried, on which object.
        what: String,
        /// What the client says.
        source: Box<kube::Error>,
    },
    /// A call took longer than `--kube-api-timeout`.
    #[error("cannot {what}: no answer within {limit:?}")]
    Deadline {
        /// What was tried, on which object.
        what: String,
        /// How long was waited.
        limit: Duration,
    },
    /// Keys or certificates could not be read or made.
    #[error("cannot {what}: {source}")]
    Pki {
        /// What was tried, on which object.
        what: String,
        /// What is wrong with them.
        source: Box<PkiError>,
    },
    /// Nothing can be done until a person acts.
    #[error("{0}")]
    Blocked(String),
}

impl Error {
    /// The error of a call to the API server. `what` completes "cannot …".
    #[must_use]
    pub fn api(what: impl Into<String>, source: kube::Error) -> Self {
        let what = what.into();
        match &source {
            kube::Error::Api(status) => match status.code {
                409 => Self::Conflict { what },
                // The authorizer's words. A role that lacks something is not the object's fault, and right after its
                // start an API server has not read the roles yet.
                403 if status.message.contains("User \"") && status.message.contains("\" cannot ") => {
                    Self::Api {
                        what,
                        source: Box::new(source),
                    }
                }
                // 403 is a quota, an admission policy, or a namespace on its way out: the object's fault as far
                // as a retry of the same request goes.
                400 | 403 | 413 | 422 => Self::Refused {
                    what,
                    message: status.message.clone(),
                },
                500 if is_misshapen(&status.message) => Self::Refused {
                    what,
                    message: status.message.clone(),
                },
                _ => Self::Api {
                    what,
                    source: Box::new(source),
                },
            },
            _ => Self::Api {
                what,
                source: Box::new(source),
            },
        }
    }

    /// Stable name of the error's kind, for metrics and Events.
    #[must_use]
    pub const fn category(&self) -> &'static str {
        match self {
            Self::Refused { .. } => "Refused",
            Self::Conflict { .. } => "Conflict",
            Self::Api { .. } => "ApiUnavailable",
            Self::Deadline { .. } => "DeadlineExceeded",
            Self::Pki { .. } => "Credentials",
            Self::Blocked(_) => "Blocked",
        }
    }

    /// Whether trying the same again is pointless until something else changes: it counts as a failed attempt.
    #[must_use]
    pub const fn is_final(&self) -> bool {
        matches!(self, Self::Refused { .. } | Self::Pki { .. } | Self::Blocked(_))
    }
}

impl From<CallError> for Error {
    fn from(error: CallError) -> Self {
        match error {
            CallError::Api { what, source } => Self::api(what, *source),
            CallError::Deadline { what, limit } => Self::Deadline { what, limit },
        }
    }
}
