//! Ranks as processes, on one machine or several: every two are connected by TCP.
//!
//! A collective is one direct exchange: each member sends every other the elements that it combines, and
//! receives its own from all, so that every rank sends (n − 1)/n of the bytes, as a ring would.
//!
//! # Numerics
//! As for ranks that are threads: each element is summed in f32 in rank order, so that processes and threads
//! give the same bits.
//!
//! # Failures
//! A member that ends, is in another collective, or does not answer in time is named on every rank.

use super::rendezvous::Rendezvous;
use super::{Communicator, element};
use crate::RunError;
use frit_ir::DType;
use frit_ir::ops::ReduceKind;
use frit_ir::plan::Team;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// How long a read waits before it looks whether another rank failed.
const LOOK: Duration = Duration::from_millis(100);
/// Bytes of the head of a message: kind, number of the collective, length.
const HEAD: usize = 17;

/// One process's end.
#[derive(Clone)]
pub struct TcpComm {
    shared: Arc<Shared>,
}

struct Shared {
    rank: usize,
    world: Team,
    timeout: Duration,
    control: Rendezvous,
    /// Connections by rank; none to itself.
    peers: Vec<Option<TcpStream>>,
    calls: AtomicU64,
    bytes: AtomicU64,
}

/// What is exchanged; members must agree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
enum Kind {
    AllGather = 1,
    ReduceScatter,
    AllReduce,
    Gather,
}

impl TcpComm {
    /// Connects every two of the processes that have met.
    ///
    /// # Errors
    /// Which of them cannot be reached.
    pub fn connect(
        mut control: Rendezvous,
        world_size: usize,
        timeout: Duration,
    ) -> Result<TcpComm, RunError> {
        let rank = control.rank();
        let refuse = |what: String| RunError::Ranks { reason: what };
        let io = |e: io::Error| refuse(format!("rank {rank} cannot listen for the others: {e}"));
        let listener = TcpListener::bind(("0.0.0.0", 0)).map_err(io)?;
        let port = listener.local_addr().map_err(io)?.port();
        let own = SocketAddr::new(control.address(), port).to_string();
        let all = control.all(own.as_bytes()).map_err(|e| refuse(e.to_string()))?;
        let mut peers: Vec<Option<TcpStream>> = (0..world_size).map(|_| None).collect();
        for (other, address) in all.iter().enumerate().take(rank) {
            let address: SocketAddr = String::from_utf8_lossy(address)
                .parse()
                .map_err(|_| refuse(format!("rank {other} gave no address")))?;
            let mut stream = TcpStream::connect_timeout(&address, timeout).map_err(|e| {
                refuse(format!("rank {rank} cannot reach rank {other} at {address}: {e}"))
            })?;
            stream.write_all(&(rank as u64).to_le_bytes()).map_err(io)?;
            peers[other] = Some(stream);
        }
        for _ in rank + 1..world_size {
            let (mut stream, _) = listener.accept().map_err(io)?;
            let mut hello = [0; 8];
            stream.set_read_timeout(Some(timeout)).map_err(io)?;
            stream.read_exact(&mut hello).map_err(io)?;
            let other = u64::from_le_bytes(hello) as usize;
            let place = peers.get_mut(other).filter(|p| p.is_none() && other > rank);
            *place.ok_or_else(|| refuse("a stranger connected".into()))? = Some(stream);
        }
        for stream in peers.iter().flatten() {
            stream.set_nodelay(true).map_err(io)?;
            stream.set_read_timeout(Some(LOOK)).map_err(io)?;
            stream.set_write_timeout(Some(LOOK)).map_err(io)?;
        }
        control.watch().map_err(|e| refuse(e.to_string()))?;
        let world = Team { first: 0, stride: 1, count: world_size };
        let (calls, bytes) = (AtomicU64::new(0), AtomicU64::new(0));
        let shared = Shared { rank, world, timeout, control, peers, calls, bytes };
        Ok(TcpComm { shared: Arc::new(shared) })
    }

    /// Says that this rank is done, and waits until all others are.
    ///
    /// # Errors
    /// If another rank fails, or is not done in time.
    pub fn finish(self) -> Result<(), RunError> {
        let shared = Arc::into_inner(self.shared).expect("invariant: the device is gone");
        shared.control.finish().map_err(|e| RunError::Ranks { reason: e.to_string() })
    }

    /// Collectives of the plan so far, and bytes that this rank received in them.
    pub fn traffic(&self) -> (u64, u64) {
        let count = |n: &AtomicU64| n.load(Ordering::Relaxed);
        (count(&self.shared.calls), count(&self.shared.bytes))
    }
}

impl Shared {
    /// Sends to every other member, and receives from each, in rank order.
    fn exchange<'b>(
        &self,
        kind: Kind,
        team: Team,
        send: impl Fn(usize) -> &'b [u8] + Sync,
        len: usize,
        mut receive: impl FnMut(usize, &[u8]),
    ) -> Result<(), RunError> {
        let number = self.calls.fetch_add(1, Ordering::Relaxed);
        let others: Vec<usize> = team.ranks().filter(|r| *r != self.rank).collect();
        let (control, timeout) = (&self.control, self.timeout);
        let link = |rank: &usize| {
            let stream = self.peers[*rank].as_ref();
            let stream = stream.expect("invariant: every two ranks are connected");
            (*rank, Link { stream, control, timeout })
        };
        let (readers, writers): (Vec<_>, Vec<_>) =
            others.iter().map(|rank| (link(rank), link(rank))).unzip();
        let mut buffer = vec![0; len];
        std::thread::scope(|scope| {
            let send = &send;
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
                received = self.receive_from(rank, &mut link, kind, number, &mut buffer);
                if received.is_err() {
                    break;
                }
                receive(rank, &buffer);
            }
            if let Err(e) = &received {
                // The sender must not wait for those that will not read.
                self.control.fail(&e.to_string());
            }
            let sent = sender.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            received.and(sent.map_err(|(rank, e)| self.lost(rank, &e)))
        })
    }

    fn receive_from(
        &self,
        rank: usize,
        link: &mut Link<'_>,
        kind: Kind,
        number: u64,
        buffer: &mut [u8],
    ) -> Result<(), RunError> {
        let mut head = [0; HEAD];
        link.read(&mut head).map_err(|e| self.lost(rank, &e))?;
        let word = |at: usize| {
            let bytes: [u8; 8] = head[at..at + 8].try_into().unwrap_or_default();
            u64::from_le_bytes(bytes)
        };
        if (head[0], word(1), word(9)) != (kind as u8, number, buffer.len() as u64) {
            let reason = format!(
                "rank {rank} is in exchange {} of kind {} with {} bytes, rank {} in {number} of kind {} with \
                 {}: they do not run the same plan",
                word(1),
                head[0],
                word(9),
                self.rank,
                kind as u8,
                buffer.len()
            );
            return Err(RunError::Ranks { reason });
        }
        link.read(buffer).map_err(|e| self.lost(rank, &e))?;
        if kind != Kind::Gather {
            self.bytes.fetch_add(buffer.len() as u64, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Why a member does not answer: what failed first, as far as any rank knows.
    fn lost(&self, rank: usize, error: &io::Error) -> RunError {
        if error.kind() == ErrorKind::TimedOut {
            let seconds = self.timeout.as_secs_f64();
            return RunError::Ranks {
                reason: format!("rank {rank} did not answer within {seconds} s"),
            };
        }
        // The word of who failed first may still be on its way.
        let end = Instant::now() + Duration::from_secs(1);
        while self.control.failure().is_none() && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(5));
        }
        let reason = self.control.failure();
        RunError::Ranks { reason: reason.unwrap_or_else(|| format!("rank {rank} ended ({error})")) }
    }
}

/// A connection that is given up when a rank fails or the time is over.
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

    /// Whether to try again after this.
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

/// The sum or mean over members, in rank order; `own` is this rank's, `others` those of the other members.
fn combine(
    team: Team,
    rank: usize,
    own: &[f32],
    others: &[(usize, Vec<f32>)],
    out: &mut [f32],
    reduce: ReduceKind,
) {
    for (i, member) in team.ranks().enumerate() {
        let part = match others.iter().find(|(r, _)| *r == member) {
            Some((_, part)) => part,
            None => {
                debug_assert_eq!(member, rank);
                own
            }
        };
        if i == 0 {
            out.copy_from_slice(part);
        } else {
            out.iter_mut().zip(part).for_each(|(sum, x)| *sum += x);
        }
    }
    if reduce == ReduceKind::Mean {
        let n = team.count as f32;
        out.iter_mut().for_each(|sum| *sum /= n);
    }
}

/// The same for elements of a type, as bytes.
fn combine_bytes(
    team: Team,
    rank: usize,
    own: &[u8],
    received: &[(usize, Vec<u8>)],
    dtype: DType,
    reduce: ReduceKind,
) -> Result<Vec<u8>, RunError> {
    let own = element::widen(own, dtype)?;
    let mut others = Vec::with_capacity(received.len());
    for (rank, bytes) in received {
        others.push((*rank, element::widen(bytes, dtype)?));
    }
    let mut sum = vec![0.0; own.len()];
    combine(team, rank, &own, &others, &mut sum, reduce);
    element::narrow(&sum, dtype)
}

impl Communicator for TcpComm {
    fn rank(&self) -> usize {
        self.shared.rank
    }

    unsafe fn all_gather(
        &self,
        team: Team,
        send: *const u8,
        recv: *mut u8,
        bytes: usize,
    ) -> Result<(), RunError> {
        // SAFETY: by the contract of this function.
        let (own, all) = unsafe {
            let all = std::slice::from_raw_parts_mut(recv, bytes * team.count);
            (std::slice::from_raw_parts(send, bytes), all)
        };
        let at = |rank: usize| team.position(rank) * bytes;
        let mine = at(self.shared.rank);
        all[mine..mine + bytes].copy_from_slice(own);
        self.shared.exchange(
            Kind::AllGather,
            team,
            |_| own,
            bytes,
            |rank, part| {
                all[at(rank)..at(rank) + bytes].copy_from_slice(part);
            },
        )
    }

    unsafe fn reduce_scatter(
        &self,
        team: Team,
        send: *const u8,
        recv: *mut u8,
        (len, dtype): (usize, DType),
        reduce: ReduceKind,
    ) -> Result<(), RunError> {
        let size = len * dtype.size();
        // SAFETY: by the contract of this function.
        let (whole, out) = unsafe {
            let whole = std::slice::from_raw_parts(send, size * team.count);
            (whole, std::slice::from_raw_parts_mut(recv, size))
        };
        let part =
            |rank: usize| &whole[team.position(rank) * size..(team.position(rank) + 1) * size];
        let mut received = Vec::new();
        self.shared.exchange(Kind::ReduceScatter, team, part, size, |rank, bytes| {
            received.push((rank, bytes.to_vec()));
        })?;
        let rank = self.shared.rank;
        let sum = combine_bytes(team, rank, part(rank), &received, dtype, reduce)?;
        out.copy_from_slice(&sum);
        Ok(())
    }

    unsafe fn all_reduce(
        &self,
        team: Team,
        send: *const u8,
        recv: *mut u8,
        (len, dtype): (usize, DType),
        reduce: ReduceKind,
    ) -> Result<(), RunError> {
        let bytes = len * dtype.size();
        // SAFETY: by the contract of this function; the result may replace what is sent.
        let whole = unsafe { std::slice::from_raw_parts(send, bytes) }.to_vec();
        // Parts of equal size, so that every message of an exchange has one length.
        let size = len.div_ceil(team.count) * dtype.size();
        let part = |rank: usize| {
            let begin = (team.position(rank) * size).min(bytes);
            begin..(begin + size).min(bytes)
        };
        let padded = |rank: usize| {
            let mut values = whole[part(rank)].to_vec();
            values.resize(size, 0);
            values
        };
        let parts: Vec<Vec<u8>> = team.ranks().map(padded).collect();
        let mut received = Vec::new();
        let send_part = |rank: usize| &parts[team.position(rank)][..];
        self.shared.exchange(Kind::AllReduce, team, send_part, size, |rank, bytes| {
            received.push((rank, bytes.to_vec()));
        })?;
        let rank = self.shared.rank;
        let own = combine_bytes(team, rank, send_part(rank), &received, dtype, reduce)?;
        // SAFETY: by the contract of this function; `whole` is a copy.
        let out = unsafe { std::slice::from_raw_parts_mut(recv, bytes) };
        let mine = part(rank);
        let n = mine.len();
        out[mine].copy_from_slice(&own[..n]);
        self.shared.exchange(
            Kind::AllReduce,
            team,
            |_| &own[..],
            size,
            |rank, bytes| {
                let place = part(rank);
                let n = place.len();
                out[place].copy_from_slice(&bytes[..n]);
            },
        )
    }

    fn gather(&self, send: &[u8]) -> Result<Vec<u8>, RunError> {
        let mut all = vec![0; send.len() * self.shared.world.count];
        all[self.shared.rank * send.len()..][..send.len()].copy_from_slice(send);
        self.shared.exchange(
            Kind::Gather,
            self.shared.world,
            |_| send,
            send.len(),
            |rank, bytes| {
                all[rank * bytes.len()..][..bytes.len()].copy_from_slice(bytes);
            },
        )?;
        Ok(if self.shared.rank == 0 { all } else { vec![] })
    }

    fn largest(&self, value: u64) -> Result<u64, RunError> {
        let agreed = self.shared.control.largest(value);
        agreed.map_err(|e| RunError::Ranks { reason: e.to_string() })
    }

    fn abort(&self) {
        self.shared.control.fail(&format!("rank {} failed", self.shared.rank));
    }
}
