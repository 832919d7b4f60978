//! A program that runs for the test, and ends with it whatever becomes of the test.

use std::{
    fs,
    io::Write as _,
    os::unix::process::CommandExt as _,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

/// A running program. Dropping it ends it.
pub(crate) struct Process {
    name: &'static str,
    dir: PathBuf,
    guard: Child,
}

impl Process {
    /// Starts `program`. Its log is kept in a folder of its own below `dir` while it runs.
    pub(crate) fn start(dir: &Path, name: &'static str, program: &Path, arguments: &[String]) -> Self {
        let dir = dir.join(format!("run-{name}"));
        fs::create_dir(&dir).unwrap();
        let mut guard = Command::new("bash")
            .args(["-c", include_str!("../support/guard.sh"), "guard"])
            .arg(&dir)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            // Not reached by Ctrl-C: it has to clean up then.
            .process_group(0)
            .spawn()
            .expect("bash is installed");
        let words = [name.to_owned(), program.display().to_string()];
        let line: Vec<_> = words.iter().chain(arguments).map(String::as_str).collect();
        let input = guard.stdin.as_mut().expect("piped");
        writeln!(input, "{}", line.join("\x1f")).expect("the guard reads");
        Self { name, dir, guard }
    }

    /// Panics with the end of its log if it has ended.
    pub(crate) fn check(&self) {
        let Ok(pid) = fs::read_to_string(self.dir.join(format!("{}.pid", self.name))) else {
            return;
        };
        let stat = fs::read_to_string(format!("/proc/{}/stat", pid.trim())).unwrap_or_default();
        let state = stat.rsplit_once(") ").map_or("X", |(_, rest)| &rest[..1]);
        let name = self.name;
        assert!(!matches!(state, "Z" | "X"), "{name} ended:\n{}", self.log());
    }

    /// The end of its log.
    pub(crate) fn log(&self) -> String {
        let log = fs::read_to_string(self.dir.join(format!("{}.log", self.name))).unwrap_or_default();
        let lines: Vec<_> = log.lines().collect();
        lines[lines.len().saturating_sub(30)..].join("\n")
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        drop(self.guard.stdin.take());
        let _ = self.guard.wait();
    }
}
