//! Tenants that run are looked after, on a real API server: what is changed by hand is put back and told of, but nobody
//! is fought with; certificates are issued again, and what is made once never is; pauses, lost data and lost namespaces
//! are respected.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    missing_docs,
    reason = "tests may fail loudly"
)]

mod drift;
mod fights;
mod losses;
mod once;
mod paused;
mod policy;
mod scene;
mod secrets;
#[path = "../support/mod.rs"]
mod support;
