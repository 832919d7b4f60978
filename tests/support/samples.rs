//! What the Go manager's users have in their clusters and repositories, where the machine has it.

use std::path::{Path, PathBuf};

/// The folder of it: `VCM_COMPAT_DIR`, or `../shared/compat`. Says so when there is none: what would be checked with it
/// is not.
pub fn of_the_go_manager() -> Option<PathBuf> {
    let default = Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared/compat");
    let folder = std::env::var_os("VCM_COMPAT_DIR").map_or(default, Into::into);
    if folder.is_dir() {
        return Some(folder);
    }
    eprintln!(
        "not checked: nothing of the Go manager in {} (set VCM_COMPAT_DIR)",
        folder.display()
    );
    None
}

/// All files below `dir`, in order.
pub fn files(dir: &Path) -> Vec<PathBuf> {
    let mut all = Vec::new();
    for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        let path = entry.path();
        if path.is_dir() {
            all.extend(files(&path));
        } else {
            all.push(path);
        }
    }
    all.sort();
    all
}
