//! Reads the command line and runs what it asks for.

use std::io::{self, Write as _};
use std::process::ExitCode;

use vc_manager::args::{self, Command, ManagerConfig};
use vc_manager::{api, build_info, process, telemetry};

fn main() -> ExitCode {
    let words = std::env::args_os()
        .skip(1)
        .map(|word| word.to_string_lossy().into_owned());
    let command = match args::parse(words, args::pod_namespace()) {
        Ok(command) => command,
        Err(error) => {
            complain(&error.message);
            return ExitCode::from(error.exit_code);
        }
    };
    match command {
        Command::Run(config) => run(*config),
        Command::Crds => api::crds_yaml().map_or_else(|error| fail(&error.to_string()), |text| print(&text)),
        Command::WebhookConfig(config) => config
            .to_yaml()
            .map_or_else(|error| fail(&error.to_string()), |text| print(&text)),
        Command::Version => print(&format!("{}\n", build_info::version_line())),
        Command::Help(text) => print(&text),
    }
}

fn run(config: ManagerConfig) -> ExitCode {
    if let Err(error) = telemetry::init(&config.log) {
        return fail(&format!("{:#}", anyhow::Error::from(error)));
    }
    match process::run(config) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!(error = format!("{error:#}"), "vc-manager failed");
            ExitCode::FAILURE
        }
    }
}

fn print(text: &str) -> ExitCode {
    let mut stdout = io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Ok(()) => ExitCode::SUCCESS,
        // The reader had enough, as with `| head`.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => ExitCode::SUCCESS,
        Err(error) => fail(&error.to_string()),
    }
}

fn fail(message: &str) -> ExitCode {
    complain(message);
    ExitCode::FAILURE
}

/// One line on stderr; there is nowhere left to report that it failed.
fn complain(message: &str) {
    let _ = writeln!(io::stderr(), "vc-manager: {message}");
}
