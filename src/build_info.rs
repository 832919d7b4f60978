//! What this binary was built from. The build passes it in the environment; nothing is asked of git or the clock.

/// Release, from `VC_MANAGER_VERSION`; otherwise the crate's version.
pub const VERSION: &str = match option_env!("VC_MANAGER_VERSION") {
    Some(version) => version,
    None => env!("CARGO_PKG_VERSION"),
};

/// Date of the build, from `VC_MANAGER_BUILD_DATE`; otherwise `unknown`.
pub const BUILD_DATE: &str = match option_env!("VC_MANAGER_BUILD_DATE") {
    Some(date) => date,
    None => "unknown",
};

/// Commit, from `VC_MANAGER_COMMIT`; otherwise `unknown`.
pub const COMMIT: &str = match option_env!("VC_MANAGER_COMMIT") {
    Some(commit) => commit,
    None => "unknown",
};

/// The first seven characters of the commit.
#[must_use]
pub fn short_commit() -> &'static str {
    COMMIT.get(..7).unwrap_or(COMMIT)
}

/// The line `--version` prints: `VirtualCluster <version> <date> <commit7>`.
#[must_use]
pub fn version_line() -> String {
    format!("VirtualCluster {VERSION} {BUILD_DATE} {}", short_commit())
}
