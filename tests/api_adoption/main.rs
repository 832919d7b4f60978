//! Tenants of the Go manager when this one is started in its place: what runs is taken over without a write to its
//! root namespace, what was left half done is finished, and the first upgrade works.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    missing_docs,
    reason = "tests may fail loudly"
)]

mod definitions;
mod found;
mod half_done;
mod made;
mod real;
mod running;
mod shape;
#[path = "../support/mod.rs"]
mod support;
