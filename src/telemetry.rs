//! Log lines.
//!
//! The JSON form has the keys of the Go manager's logs, `level`, `ts`, `logger` and `msg`, so that existing parsing
//! rules keep working; then the event's fields, then those of the spans it happened in, unless the name is taken by
//! something nearer. Lines go to stderr, and to a file as well if one is named.

use std::fmt;
use std::fs::{File, OpenOptions};
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use serde_json::{Map, Value};
use tracing::field::{Field, Visit};
use tracing::{Event, Subscriber};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::format::{FormatFields, JsonFields, Writer};
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};
use tracing_subscriber::fmt::writer::{BoxMakeWriter, MakeWriterExt};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormattedFields};
use tracing_subscriber::registry::LookupSpan;

use crate::args::{LogConfig, LogFormat};

/// Why logging could not be set up.
#[derive(Debug, thiserror::Error)]
pub enum TelemetryError {
    /// The log file cannot be opened for appending.
    #[error("cannot open log file {}", path.display())]
    File {
        /// The file named by `--log-file`.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The filter cannot be read.
    #[error("invalid log filter")]
    Filter(#[from] tracing_subscriber::filter::ParseError),
    /// Something in this process has set up logging before.
    #[error("logging is already set up")]
    AlreadySet,
}

/// Sets up logging for the whole process. To be called once.
pub fn init(config: &LogConfig) -> Result<(), TelemetryError> {
    let subscriber = tracing_subscriber::fmt()
        .with_env_filter(EnvFilter::try_new(&config.filter)?)
        .with_ansi(false)
        .with_writer(writer(config)?);
    let set = match config.format {
        LogFormat::Json => subscriber
            .fmt_fields(JsonFields::new())
            .event_format(ZapJson)
            .try_init(),
        LogFormat::Text => subscriber.try_init(),
    };
    set.map_err(|_| TelemetryError::AlreadySet)
}

fn writer(config: &LogConfig) -> Result<BoxMakeWriter, TelemetryError> {
    let Some(path) = &config.file else {
        return Ok(BoxMakeWriter::new(io::stderr));
    };
    let file: Arc<File> = OpenOptions::new()
        .create(true)
        .append(true)
        .open(path)
        .map_err(|source| TelemetryError::File {
            path: path.clone(),
            source,
        })?
        .into();
    Ok(BoxMakeWriter::new(io::stderr.and(file)))
}

/// Formats an event as one line of JSON with the keys of zap's production encoder.
struct ZapJson;

impl<S, N> FormatEvent<S, N> for ZapJson
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        ctx: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let mut fields = Fields::default();
        event.record(&mut fields);
        let Fields { message, mut others } = fields;
        // From the innermost span outwards, so that the nearest value of a name wins.
        for span in ctx.event_scope().into_iter().flatten() {
            let extensions = span.extensions();
            let recorded = extensions
                .get::<FormattedFields<N>>()
                .map(|fields| fields.fields.as_str());
            if let Some(Ok(Value::Object(recorded))) = recorded.map(serde_json::from_str) {
                for (name, value) in recorded {
                    others.entry(name).or_insert(value);
                }
            }
        }
        let mut ts = String::new();
        SystemTime.format_time(&mut Writer::new(&mut ts))?;
        let metadata = event.metadata();
        write!(
            writer,
            "{{\"level\":\"{}\",\"ts\":{},\"logger\":{},\"msg\":{}",
            metadata.level().as_str().to_ascii_lowercase(),
            Value::String(ts),
            Value::from(metadata.target()),
            Value::String(message),
        )?;
        for (name, value) in others {
            if !matches!(name.as_str(), "level" | "ts" | "logger" | "msg") {
                write!(writer, ",{}:{value}", Value::String(name))?;
            }
        }
        writeln!(writer, "}}")
    }
}

/// The message and the other fields of an event.
#[derive(Default)]
struct Fields {
    message: String,
    others: Map<String, Value>,
}

impl Fields {
    fn set(&mut self, field: &Field, value: Value) {
        match (field.name(), value) {
            ("message", Value::String(text)) => self.message = text,
            ("message", value) => self.message = value.to_string(),
            (name, value) => {
                let name = name.strip_prefix("r#").unwrap_or(name);
                self.others.insert(name.to_owned(), value);
            }
        }
    }
}

impl Visit for Fields {
    fn record_f64(&mut self, field: &Field, value: f64) {
        self.set(field, Value::from(value));
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.set(field, Value::from(value));
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.set(field, Value::from(value));
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.set(field, Value::from(value));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.set(field, Value::from(value));
    }

    fn record_error(&mut self, field: &Field, value: &(dyn std::error::Error + 'static)) {
        let mut text = value.to_string();
        let mut source = value.source();
        while let Some(error) = source {
            text.push_str(": ");
            text.push_str(&error.to_string());
            source = error.source();
        }
        self.set(field, Value::String(text));
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.set(field, Value::String(format!("{value:?}")));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    #[derive(Clone, Default)]
    struct Buffer(Arc<Mutex<Vec<u8>>>);

    impl io::Write for Buffer {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn json_line() {
        let buffer = Buffer::default();
        let writer = buffer.clone();
        let subscriber = tracing_subscriber::fmt()
            .with_env_filter(EnvFilter::new("info"))
            .with_writer(move || writer.clone())
            .fmt_fields(JsonFields::new())
            .event_format(ZapJson)
            .finish();
        tracing::subscriber::with_default(subscriber, || {
            let outer = tracing::info_span!("outer", vc = "a/b", step = "outer", level = 9);
            let _outer = outer.enter();
            let inner = tracing::info_span!("inner", step = "inner");
            let _inner = inner.enter();
            let error = io::Error::other(TelemetryError::AlreadySet);
            tracing::warn!(
                count = 3,
                ok = true,
                error = &error as &dyn std::error::Error,
                "apply\n\"{}\"",
                "etcd"
            );
            tracing::debug!("not shown");
        });
        let text = String::from_utf8(buffer.0.lock().unwrap().clone()).unwrap();
        assert!(text.ends_with('\n') && text.lines().count() == 1, "{text}");
        assert!(text.starts_with("{\"level\":\"warn\",\"ts\":\""), "{text}");
        let line: Map<String, Value> = serde_json::from_str(&text).unwrap();
        assert_eq!(line["msg"], "apply\n\"etcd\"");
        assert_eq!(line["logger"], "vc_manager::telemetry::tests");
        assert_eq!(line["count"], 3);
        assert_eq!(line["ok"], true);
        assert_eq!(line["vc"], "a/b");
        assert_eq!(line["step"], "inner");
        assert_eq!(line["error"], "logging is already set up");
    }

    #[test]
    fn file_gets_a_copy_and_keeps_what_it_had() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        std::fs::write(&path, "old\n").unwrap();
        let config = LogConfig {
            format: LogFormat::Text,
            filter: "info".into(),
            file: Some(path.clone()),
        };
        let subscriber = tracing_subscriber::fmt()
            .with_ansi(false)
            .with_writer(writer(&config).unwrap())
            .finish();
        tracing::subscriber::with_default(subscriber, || tracing::info!("new"));
        let text = std::fs::read_to_string(&path).unwrap();
        assert!(text.starts_with("old\n") && text.contains("new"), "{text}");
        let nowhere = LogConfig {
            file: Some(dir.path().join("no/such/log")),
            ..config
        };
        assert!(writer(&nowhere).is_err_and(|error| error.to_string().starts_with("cannot open log file")));
    }
}
