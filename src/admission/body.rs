//! Reads the bodies of reviews, within bounds: of one body, of the time it takes, and of the memory that all of them
//! together may take, what is made of them included. When there is no room, the body that has dawdled the longest is
//! given up, so that peers who send slowly keep nobody else out.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use axum::body::{Body, BodyDataStream, Bytes};
use futures::StreamExt as _;
use http::StatusCode;
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::{Instant, sleep, timeout_at};
use tokio_util::sync::CancellationToken;

/// Largest body. A review carries the object before and after, and the managed fields of both.
pub const BODY_LIMIT: usize = 8 * 1024 * 1024;
/// Memory for all reviews at once.
const BUDGET: usize = 64 * 1024 * 1024;
/// Most that one body may make: what the largest object that can be stored makes, before and after, be it as dense as it
/// will.
const ONE: usize = BUDGET / 4 * 5;
/// Most that is counted of one: all but the room for its own text. Two such are never there at once.
const ONE_COUNTED: usize = BUDGET - BODY_LIMIT;
/// The budget is counted in units of so many bytes.
const UNIT: usize = 1024;
/// Memory that each value in a body takes once it is read, its share of a map included.
const PER_VALUE: usize = 128;
/// Time in which a body is not yet taken for one that dawdles. The API server sends its own at once.
const BRISK: Duration = Duration::from_millis(250);
/// Pause before it is looked again whether there is room.
const PAUSE: Duration = Duration::from_millis(10);

/// Why a body is not read; the status and text of the answer.
pub type Rejected = (StatusCode, &'static str);

const NO_ROOM: Rejected = (
    StatusCode::SERVICE_UNAVAILABLE,
    "the body took too long, or too many reviews are under way: try again\n",
);

/// The memory that reviews may take.
pub struct Budget {
    room: Semaphore,
    arriving: Mutex<Arriving>,
}

/// Bodies that have not come to their end, by the order in which they began.
#[derive(Default)]
struct Arriving {
    next: u64,
    bodies: BTreeMap<u64, (Instant, CancellationToken)>,
}

impl Default for Budget {
    fn default() -> Self {
        Self {
            room: Semaphore::new(BUDGET / UNIT),
            arriving: Mutex::default(),
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
    /// Reads a body to its end, and makes room for what it says; all of it until `deadline`.
    pub async fn read(&self, body: Body, deadline: Instant) -> Result<Held<'_>, Rejected> {
        let arrival = self.begin();
        let read = async {
            tokio::select! {
                () = arrival.given_up.cancelled() => Err(NO_ROOM),
                read = self.read_all(body) => read,
            }
        };
        let (bytes, mut room) = timeout_at(deadline, read).await.unwrap_or(Err(NO_ROOM))?;
        // It dawdles no more: what is waited for now are others.
        drop(arrival);
        let made = values(&bytes) * PER_VALUE;
        let more = timeout_at(deadline, self.room(made)).await;
        room.merge(more.unwrap_or(Err(NO_ROOM))?);
        Ok(Held { bytes, _room: room })
    }

    async fn read_all(&self, body: Body) -> Result<(Vec<u8>, SemaphorePermit<'_>), Rejected> {
        let mut bytes = Vec::new();
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
        Ok((bytes, room))
    }

    /// Room for so many bytes, for which a body that dawdles may have to go. Not in turn: what needs little is not to
    /// wait behind what needs much.
    async fn room(&self, bytes: usize) -> Result<SemaphorePermit<'_>, Rejected> {
        if bytes > ONE {
            return Err((
                StatusCode::PAYLOAD_TOO_LARGE,
                "the body has more values than any object that can be stored\n",
            ));
        }
        let units = u32::try_from(bytes.min(ONE_COUNTED).div_ceil(UNIT)).unwrap_or(u32::MAX);
        loop {
            if let Ok(permit) = self.room.try_acquire_many(units) {
                return Ok(permit);
            }
            self.give_up_slowest();
            sleep(PAUSE).await;
        }
    }

    fn begin(&self) -> Arrival<'_> {
        let mut arriving = self.arriving.lock().unwrap_or_else(PoisonError::into_inner);
        let id = arriving.next;
        arriving.next += 1;
        let given_up = CancellationToken::new();
        arriving.bodies.insert(id, (Instant::now(), given_up.clone()));
        Arrival {
            budget: self,
            id,
            given_up,
        }
    }

    fn give_up_slowest(&self) {
        let arriving = self.arriving.lock().unwrap_or_else(PoisonError::into_inner);
        let slowest = arriving
            .bodies
            .values()
            .find(|(_, given_up)| !given_up.is_cancelled());
        if let Some((began, given_up)) = slowest
            && began.elapsed() > BRISK
        {
            given_up.cancel();
        }
    }
}

/// A body on its way.
struct Arrival<'a> {
    budget: &'a Budget,
    id: u64,
    given_up: CancellationToken,
}

impl Drop for Arrival<'_> {
    fn drop(&mut self) {
        let mut arriving = self
            .budget
            .arriving
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        arriving.bodies.remove(&self.id);
    }
}

/// Reads a body that nobody wants, see [`discard`].
pub(super) async fn drain(body: Body) {
    // A time-out is fine: the peer is told anyway.
    let _ = tokio::time::timeout(BRISK * 4, discard(body.into_data_stream())).await;
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

/// At most so many values are in a JSON text: each but the first comes after a separator, and those inside of strings
/// separate nothing.
fn values(text: &[u8]) -> usize {
    let (mut in_string, mut escaped) = (false, false);
    let mut count = 1;
    for byte in text {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if in_string => escaped = true,
            b'"' => in_string = !in_string,
            b',' | b'[' | b'{' | b':' if !in_string => count += 1,
            _ => {}
        }
    }
    count
}

#[cfg(test)]
mod tests {
    use futures::stream;

    use super::*;

    const MIB: usize = 1024 * 1024;

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(5)
    }

    fn chunked(chunks: usize, size: usize) -> Body {
        let chunk = vec![b' '; size];
        Body::from_stream(stream::iter(
            (0..chunks).map(move |_| Ok::<_, std::io::Error>(chunk.clone())),
        ))
    }

    /// A body that never comes to its end, after so many MiB.
    fn dawdling(mib: usize) -> Body {
        let sent = stream::iter((0..mib).map(|_| Ok::<_, std::io::Error>(vec![b' '; MIB])));
        Body::from_stream(sent.chain(stream::pending()))
    }

    #[tokio::test]
    async fn a_body_is_read_up_to_its_limit() {
        let budget = Budget::default();
        let held = budget.read(chunked(8, MIB), soon()).await.ok().unwrap();
        assert_eq!(held.bytes.len(), BODY_LIMIT);
        drop(held);
        let rejected = budget.read(chunked(9, MIB), soon()).await.err().unwrap();
        assert_eq!(rejected.0, StatusCode::PAYLOAD_TOO_LARGE);
        assert_eq!(budget.room.available_permits(), BUDGET / UNIT);
        assert!(budget.arriving.lock().unwrap().bodies.is_empty());
    }

    #[tokio::test]
    async fn what_finds_no_room_waits_and_is_sent_away() {
        let budget = Budget::default();
        let mut held = Vec::new();
        for _ in 0..8 {
            held.push(budget.read(chunked(8, MIB - 1024), soon()).await.ok().unwrap());
        }
        let short = Instant::now() + Duration::from_millis(200);
        assert_eq!(budget.read(chunked(1, MIB), short).await.err().unwrap(), NO_ROOM);
        let waiting = budget.read(chunked(1, MIB), soon());
        let ((), read) = futures::join!(async { drop(held.pop()) }, waiting);
        assert!(read.is_ok());
    }

    #[tokio::test]
    async fn bodies_that_dawdle_make_room() {
        let budget = Budget::default();
        let slow: Vec<_> = (0..10).map(|_| budget.read(dawdling(7), soon())).collect();
        let brisk = async {
            sleep(BRISK * 2).await;
            let started = Instant::now();
            let read = budget.read(chunked(8, MIB), soon()).await;
            (read.is_ok(), started.elapsed())
        };
        let (slow, (read, took)) = futures::join!(futures::future::join_all(slow), brisk);
        assert!(read && took < Duration::from_secs(1), "{took:?}");
        assert!(slow.iter().all(Result::is_err));
    }

    #[tokio::test]
    async fn many_small_values_need_more_room_than_their_text() {
        let budget = Budget::default();
        let many = format!("[{}0]", "0,".repeat(MIB));
        let rejected = budget.read(Body::from(many), soon()).await.err().unwrap();
        assert_eq!(rejected.0, StatusCode::PAYLOAD_TOO_LARGE);
        // As dense as an object of 1.5 MiB can be, before and after.
        let dense = format!("[{}0]", r#"{"name":"A","value":"1"},"#.repeat(3 * MIB / 25));
        assert!(budget.read(Body::from(dense), soon()).await.is_ok());
        for (text, count) in [
            ("", 1),
            ("0", 1),
            ("[0]", 2),
            (r#"{"a":0}"#, 3),
            ("[0,1]", 3),
            (r#"["a,b:[{"]"#, 2),
            (r#"["\",\\",0]"#, 3),
        ] {
            assert_eq!(values(text.as_bytes()), count, "{text}");
        }
    }
}
