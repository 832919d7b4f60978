//! Odd things that happen to tenants that run, on a real API server.

#![allow(
    clippy::print_stdout,
    clippy::unwrap_used,
    clippy::expect_used,
    missing_docs,
    reason = "tests may fail loudly"
)]

mod at_rest;
mod help;
#[path = "../support/mod.rs"]
mod support;
mod told;
