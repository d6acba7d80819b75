//! TCP connections between all pairs of processes.

use super::door::{Door, enter};
use super::processes::{Exchange, Links};
use super::rendezvous::Rendezvous;
use super::secret::SecretSource;
use crate::CommError;
use std::cell::Cell;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

/// Interval at which a read checks whether another rank failed.
const LOOK: Duration = Duration::from_millis(100);
/// Bytes of the head of a message: kind, number of the collective, length.
const HEAD: usize = 17;

/// Connections by rank; none to itself.
pub(super) struct TcpLinks(Vec<Option<TcpStream>>);

impl TcpLinks {
    /// Connects all processes of the job pairwise.
    ///
    /// # Errors
    /// Which of them cannot be reached.
    pub(super) fn connect(
        control: &mut Rendezvous,
        world_size: usize,
        timeout: Duration,
    ) -> Result<TcpLinks, CommError> {
        let rank = control.rank();
        let end = Instant::now() + timeout;
        let refuse = CommError::from;
        let io = |e: io::Error| refuse(format!("rank {rank} cannot listen for the others: {e}"));
        let door = Door::open_anywhere(control.address()).map_err(io)?;
        let own = door.address().to_string();
        let all = control.all(own.as_bytes())?;
        let mut peers: Vec<Option<TcpStream>> = (0..world_size).map(|_| None).collect();
        let source = SecretSource::Known(control.secret().clone());
        for (other, address) in all.iter().enumerate().take(rank) {
            let address: SocketAddr = String::from_utf8_lossy(address)
                .parse()
                .map_err(|_| refuse(format!("rank {other} sent no address")))?;
            let to = (&address.ip().to_string()[..], address.port());
            let entered = enter(to, &source, &(rank as u64).to_le_bytes(), end);
            let (stream, _) = entered.map_err(|e| {
                refuse(format!("rank {rank} cannot reach rank {other} at {address}: {e}"))
            })?;
            peers[other] = Some(stream);
        }
        accept_later_ranks(&door, control, end, &mut peers)?;
        for stream in peers.iter().flatten() {
            stream.set_nodelay(true).map_err(io)?;
            stream.set_read_timeout(Some(LOOK)).map_err(io)?;
            stream.set_write_timeout(Some(LOOK)).map_err(io)?;
        }
        Ok(TcpLinks(peers))
    }
}

/// Waits for the connections of the ranks after this one.
fn accept_later_ranks(
    door: &Door,
    control: &Rendezvous,
    end: Instant,
    peers: &mut [Option<TcpStream>],
) -> Result<(), CommError> {
    let rank = control.rank();
    let missing =
        |peers: &[Option<TcpStream>]| (rank + 1..peers.len()).find(|r| peers[*r].is_none());
    if missing(peers).is_none() {
        return Ok(());
    }
    let (_, complete) = door.admit(control.secret(), &Cell::new(end), |(stream, greeting)| {
        let other = greeting.try_into().map_or(usize::MAX, |g| u64::from_le_bytes(g) as usize);
        let place = peers.get_mut(other).filter(|p| p.is_none() && other > rank);
        let stranger = || CommError::Ranks {
            reason: format!("rank {rank} met rank {other} twice, or an unknown rank"),
        };
        *place.ok_or_else(stranger)? = Some(stream);
        Ok::<bool, CommError>(missing(peers).is_none())
    })?;
    let reason = |other| format!("rank {other} did not connect to rank {rank} in time");
    match missing(peers).filter(|_| !complete) {
        Some(other) => Err(CommError::Ranks { reason: reason(other) }),
        None => Ok(()),
    }
}

/// Receives the message of one member.
fn receive_from(
    rank: usize,
    link: &mut Link<'_>,
    exchange: &Exchange<'_, '_>,
    buffer: &mut [u8],
) -> Result<(), CommError> {
    let (kind, number) = (exchange.kind as u8, exchange.number);
    let mut head = [0; HEAD];
    link.read(&mut head).map_err(|e| exchange.lost(rank, &e))?;
    let word = |at: usize| {
        let bytes: [u8; 8] = head[at..at + 8].try_into().unwrap_or_default();
        u64::from_le_bytes(bytes)
    };
    if (head[0], word(1), word(9)) != (kind, number, buffer.len() as u64) {
        let reason = format!(
            "rank {rank} is in exchange {} of kind {} with {} bytes, rank {} in {number} of kind {kind} with \
             {}: they do not run the same plan",
            word(1),
            head[0],
            word(9),
            exchange.rank,
            buffer.len()
        );
        return Err(CommError::Ranks { reason });
    }
    link.read(buffer).map_err(|e| exchange.lost(rank, &e))
}

impl Links for TcpLinks {
    fn exchange(
        &self,
        exchange: &Exchange<'_, '_>,
        receive: &mut dyn FnMut(usize, &[u8]),
    ) -> Result<(), CommError> {
        let &Exchange { kind, number, control, timeout, send, .. } = exchange;
        let link = |rank: &usize| {
            let stream = self.0[*rank].as_ref();
            let stream = stream.expect("invariant: every two ranks are connected");
            (*rank, Link { stream, control, timeout })
        };
        let (readers, writers): (Vec<_>, Vec<_>) =
            exchange.others.iter().map(|rank| (link(rank), link(rank))).unzip();
        let mut buffer = vec![0; exchange.len];
        std::thread::scope(|scope| {
            let sender = scope.spawn(move || -> Result<(), (usize, io::Error)> {
                for (rank, mut link) in writers {
                    let bytes = send(rank);
                    let mut head = [0; HEAD];
                    head[0] = kind as u8;
                    head[1..9].copy_from_slice(&number.to_le_bytes());
                    head[9..].copy_from_slice(&(bytes.len() as u64).to_le_bytes());
                    link.write(&head).and_then(|()| link.write(bytes)).map_err(|e| (rank, e))?;
                }
                Ok(())
            });
            let mut received = Ok(());
            for (rank, mut link) in readers {
                received = receive_from(rank, &mut link, exchange, &mut buffer);
                if received.is_err() {
                    break;
                }
                receive(rank, &buffer);
            }
            if let Err(e) = &received {
                // The sender must not wait for ranks that will not read.
                control.fail(&e.to_string());
            }
            let sent = sender.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            received.and(sent.map_err(|(rank, e)| exchange.lost(rank, &e)))
        })
    }

    fn finish(self: Box<Self>) {}
}

/// A connection whose operations end when a rank fails or the time limit is reached.
struct Link<'a> {
    stream: &'a TcpStream,
    control: &'a Rendezvous,
    timeout: Duration,
}

impl Link<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<()> {
        let (mut at, mut begin) = (0, Instant::now());
        while at < buffer.len() {
            match self.stream.read(&mut buffer[at..]) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(n) => (at, begin) = (at + n, Instant::now()),
                Err(e) => self.go_on(e, begin)?,
            }
        }
        Ok(())
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        let (mut at, mut begin) = (0, Instant::now());
        while at < bytes.len() {
            match self.stream.write(&bytes[at..]) {
                Ok(n) => (at, begin) = (at + n, Instant::now()),
                Err(e) => self.go_on(e, begin)?,
            }
        }
        Ok(())
    }

    /// Whether to retry after this.
    fn go_on(&self, error: io::Error, begin: Instant) -> io::Result<()> {
        match error.kind() {
            ErrorKind::Interrupted => Ok(()),
            ErrorKind::WouldBlock | ErrorKind::TimedOut => {
                if self.control.failure().is_some() {
                    return Err(ErrorKind::ConnectionAborted.into());
                }
                if begin.elapsed() > self.timeout {
                    return Err(ErrorKind::TimedOut.into());
                }
                Ok(())
            }
            _ => Err(error),
        }
    }
}
