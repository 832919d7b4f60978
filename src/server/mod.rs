//! The HTTP listeners: one over TLS for webhooks, metrics and health, and plain ones for health and metrics.
//!
//! Every replica runs all of them, leader or not. A listener takes no more connections than its limit, closes those
//! that dawdle, and at shutdown finishes what is in flight.

pub mod certificate;
pub mod configurations;
mod connections;
pub mod health;
pub mod listen;
pub mod metrics_endpoint;
pub mod router;
pub mod self_check;
pub mod serve;
pub mod shared_ca;
pub mod source;
pub mod tls;
mod upkeep;
