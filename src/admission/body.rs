//! Reads the bodies of reviews, within bounds: of one body, of the time it takes, and of the memory that all of them
//! together may take, what is made of them included. Who asks for more waits, and is then told to come back.

use std::time::Duration;

use axum::body::{Body, BodyDataStream, Bytes};
use futures::StreamExt as _;
use http::StatusCode;
use hyper::body::Body as _;
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::{Instant, timeout_at};

/// Largest body. A review carries the object before and after, and the managed fields of both.
pub const BODY_LIMIT: usize = 8 * 1024 * 1024;
/// Memory for all reviews at once.
const BUDGET: usize = 32 * 1024 * 1024;
/// The budget is counted in units of so many bytes.
const UNIT: usize = 1024;
/// Memory for what is made of one body. The largest object that can be stored, twice, takes two thirds of it.
const ONE_BUDGET: usize = BUDGET / 4 * 3;
/// Memory that each value in a body takes once it is read, its share of a map included.
const PER_VALUE: usize = 96;
/// Time for a body to arrive and to find room.
const PATIENCE: Duration = Duration::from_secs(5);

/// Why a body is not read; the status and text of the answer.
pub type Rejected = (StatusCode, &'static str);

/// The memory that reviews may take.
pub struct Budget {
    room: Semaphore,
    patience: Duration,
}

impl Default for Budget {
    fn default() -> Self {
        Self {
            room: Semaphore::new(BUDGET / UNIT),
            patience: PATIENCE,
        }
    }
}

/// A body that was read, with the room it takes for as long as it lives.
pub struct Held<'a> {
    /// The bytes.
    pub bytes: Vec<u8>,
    _room: SemaphorePermit<'a>,
}

impl Budget {
    /// Reads a body to its end, and makes room for what it says.
    pub async fn read(&self, body: Body) -> Result<Held<'_>, Rejected> {
        let deadline = Instant::now() + self.patience;
        timeout_at(deadline, self.read_all(body)).await.unwrap_or(Err((
            StatusCode::SERVICE_UNAVAILABLE,
            "the body took too long, or too many reviews are under way: try again\n",
        )))
    }

    async fn read_all(&self, body: Body) -> Result<Held<'_>, Rejected> {
        // Room for what is announced, so that it need not grow, and thus be there twice. The system gives it page by page.
        let announced = body
            .size_hint()
            .upper()
            .and_then(|size| usize::try_from(size).ok());
        let mut bytes = Vec::with_capacity(announced.unwrap_or_default().min(BODY_LIMIT));
        let mut room = self.room(0).await?;
        let mut held = 0;
        let mut chunks = body.into_data_stream();
        while let Some(chunk) = chunks.next().await {
            let chunk: Bytes =
                chunk.map_err(|_| (StatusCode::BAD_REQUEST, "the body ended before its end\n"))?;
            if bytes.len() + chunk.len() > BODY_LIMIT {
                drop((bytes, room));
                discard(chunks).await;
                return Err((StatusCode::PAYLOAD_TOO_LARGE, "the body is larger than 8 MiB\n"));
            }
            // In whole units only: a body that comes byte by byte takes no more room than another.
            let missing = (bytes.len() + chunk.len()).saturating_sub(held).div_ceil(UNIT) * UNIT;
            room.merge(self.room(missing).await?);
            held += missing;
            bytes.extend_from_slice(&chunk);
        }
        room.merge(self.room(values(&bytes) * PER_VALUE).await?);
        Ok(Held { bytes, _room: room })
    }

    async fn room(&self, bytes: usize) -> Result<SemaphorePermit<'_>, Rejected> {
        if bytes > ONE_BUDGET {
            return Err((
                StatusCode::PAYLOAD_TOO_LARGE,
                "the body has more values than any object that can be stored\n",
            ));
        }
        // Fits: it is less than the budget.
        let units = u32::try_from(bytes.div_ceil(UNIT)).unwrap_or(u32::MAX);
        self.room
            .acquire_many(units)
            .await
            .map_err(|_| (StatusCode::SERVICE_UNAVAILABLE, "no room\n"))
    }
}

/// Reads on without keeping anything, though not for ever: a peer that is cut off while it sends does not see why.
async fn discard(mut chunks: BodyDataStream) {
    let mut left = BODY_LIMIT;
    while left > 0
        && let Some(Ok(chunk)) = chunks.next().await
    {
        left = left.saturating_sub(chunk.len());
    }
}

/// At most so many values are in a JSON text: each but the first comes after one of these.
fn values(text: &[u8]) -> usize {
    1 + text
        .iter()
        .filter(|byte| matches!(byte, b',' | b'[' | b'{' | b':'))
        .count()
}

#[cfg(test)]
mod tests {
    use futures::stream;

    use super::*;

    fn chunked(chunks: usize, size: usize) -> Body {
        let chunk = vec![b' '; size];
        Body::from_stream(stream::iter(
            (0..chunks).map(move |_| Ok::<_, std::io::Error>(chunk.clone())),
        ))
    }

    #[tokio::test]
    async fn a_body_is_read_up_to_its_limit() {
        let budget = Budget::default();
        let held = budget.read(chunked(8, 1024 * 1024)).await.ok().unwrap();
        assert_eq!(held.bytes.len(), BODY_LIMIT);
        drop(held);
        let rejected = budget.read(chunked(9, 1024 * 1024)).await.err().unwrap();
        assert_eq!(rejected.0, StatusCode::PAYLOAD_TOO_LARGE);
        assert_eq!(budget.room.available_permits(), BUDGET / UNIT);
    }

    fn impatient() -> Budget {
        Budget {
            patience: Duration::from_millis(200),
            ..Budget::default()
        }
    }

    #[tokio::test]
    async fn what_finds_no_room_waits_and_is_sent_away() {
        let budget = impatient();
        let mut held = Vec::new();
        for _ in 0..4 {
            held.push(budget.read(chunked(8, 1024 * 1024 - 1024)).await.ok().unwrap());
        }
        let rejected = budget.read(chunked(1, 1024 * 1024)).await.err().unwrap();
        assert_eq!(rejected.0, StatusCode::SERVICE_UNAVAILABLE);
        let waiting = budget.read(chunked(1, 1024 * 1024));
        let ((), read) = futures::join!(async { drop(held.pop()) }, waiting);
        assert!(read.is_ok());
    }

    #[tokio::test]
    async fn many_small_values_need_more_room_than_their_text() {
        let text = format!("[{}0]", "0,".repeat(1024 * 1024));
        let rejected = Budget::default().read(Body::from(text)).await.err().unwrap();
        assert_eq!(rejected.0, StatusCode::PAYLOAD_TOO_LARGE);
        for text in ["", "0", "[0]", "{\"a\":0}", "[0,1]"] {
            assert!(values(text.as_bytes()) >= usize::from(!text.is_empty()));
        }
    }

    #[tokio::test]
    async fn a_body_that_dawdles_is_not_waited_for() {
        let body = Body::from_stream(stream::pending::<Result<Bytes, std::io::Error>>());
        let rejected = impatient().read(body).await.err().unwrap();
        assert_eq!(rejected.0, StatusCode::SERVICE_UNAVAILABLE);
    }
}
