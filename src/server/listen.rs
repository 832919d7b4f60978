//! Listen addresses in the form Go's `net.Listen` takes them.

use std::fmt;
use std::io;
use std::str::FromStr;

use tokio::net::TcpListener;

/// `host:port`. An empty host (`:8080`) means every interface, IPv4 and IPv6; port 0 means any free port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListenAddr {
    host: String,
    port: u16,
}

/// The text is no listen address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ListenAddrError {
    /// No `:` that sets off a port.
    #[error("missing port in address")]
    MissingPort,
    /// What follows the last `:` is no number from 0 to 65535.
    #[error("invalid port")]
    InvalidPort,
    /// An IPv6 address without `[` and `]`, or these in the wrong place.
    #[error("an IPv6 address needs brackets, as in [::1]:8080")]
    Brackets,
}

impl FromStr for ListenAddr {
    type Err = ListenAddrError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (host, port) = text.rsplit_once(':').ok_or(ListenAddrError::MissingPort)?;
        let port = if port.bytes().all(|b| b.is_ascii_digit()) {
            port.parse().ok()
        } else {
            None
        };
        let port = port.ok_or(ListenAddrError::InvalidPort)?;
        let host = match host.strip_prefix('[') {
            Some(inner) => inner.strip_suffix(']').ok_or(ListenAddrError::Brackets)?,
            None => host,
        };
        let bracketed = text.starts_with('[');
        if host.contains(['[', ']']) || host.contains(':') != bracketed {
            return Err(ListenAddrError::Brackets);
        }
        Ok(Self {
            host: host.to_owned(),
            port,
        })
    }
}

impl fmt::Display for ListenAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host.contains(':') {
            write!(f, "[{}]:{}", self.host, self.port)
        } else {
            write!(f, "{}:{}", self.host, self.port)
        }
    }
}

impl ListenAddr {
    /// An address from its parts.
    pub fn new(host: impl Into<String>, port: u16) -> Self {
        Self {
            host: host.into(),
            port,
        }
    }

    /// Opens the listening socket.
    pub async fn bind(&self) -> io::Result<TcpListener> {
        if !self.host.is_empty() {
            return TcpListener::bind((self.host.as_str(), self.port)).await;
        }
        match TcpListener::bind(("::", self.port)).await {
            // A machine without IPv6: the socket cannot be made (EAFNOSUPPORT) or the address is absent.
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::AddrNotAvailable | io::ErrorKind::Unsupported
                ) || error.raw_os_error() == Some(97) =>
            {
                TcpListener::bind(("0.0.0.0", self.port)).await
            }
            other => other,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forms() {
        for (text, host, port) in [
            (":8080", "", 8080),
            ("127.0.0.1:0", "127.0.0.1", 0),
            ("localhost:9443", "localhost", 9443),
            ("[::1]:9443", "::1", 9443),
            ("[::]:1", "::", 1),
        ] {
            let addr: ListenAddr = text.parse().unwrap();
            assert_eq!(addr, ListenAddr::new(host, port));
            assert_eq!(addr.to_string(), text);
        }
        for (text, error) in [
            ("8080", ListenAddrError::MissingPort),
            ("", ListenAddrError::MissingPort),
            ("localhost:", ListenAddrError::InvalidPort),
            ("localhost:+1", ListenAddrError::InvalidPort),
            (":65536", ListenAddrError::InvalidPort),
            ("::1:80", ListenAddrError::Brackets),
            ("[::1:80", ListenAddrError::Brackets),
            ("[localhost]:80", ListenAddrError::Brackets),
        ] {
            assert_eq!(text.parse::<ListenAddr>(), Err(error), "{text}");
        }
    }

    #[tokio::test]
    async fn all_interfaces() {
        let listener = ListenAddr::new("", 0).bind().await.unwrap();
        let port = listener.local_addr().unwrap().port();
        tokio::net::TcpStream::connect(("127.0.0.1", port)).await.unwrap();
    }
}
