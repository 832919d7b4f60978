//! The PKI of a tenant.
