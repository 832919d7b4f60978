//! What needs no cluster: renderings against golden files, the plan as tables and properties, the checked-in
//! manifests against what the program prints.

#![allow(
    clippy::expect_used,
    clippy::needless_for_each,
    clippy::match_same_arms,
    clippy::default_trait_access,
    reason = "a test that cannot go on panics, and reads best as a table"
)]

mod credentials;
mod fixture;
mod manifests;
mod plan;
mod real;
mod render;
mod three_years;
mod upkeep;
mod world;
