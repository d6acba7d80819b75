//! Communicator for ranks that are processes, on one or more machines.
//!
//! A collective is one direct exchange: each member sends every other member the elements it reduces and receives its own
//! from all, so every rank sends (n − 1)/n of the bytes, as in a ring. Messages go over [`tcp`](super::tcp), or through MPI
//! if the feature `mpi` is enabled and the process was started by `mpirun`. MPI's own collectives are not used, so that
//! an unresponsive rank can be identified and elements are summed in one order.
//!
//! # Numerics
//! Each element is summed in f32 in the order of [`Tree`]: results are bit-identical to ranks that are threads.
//!
//! # Errors
//! Every rank names a member that ends, is in another collective, or does not answer in time.

use super::launch::Launch;
#[cfg(feature = "mpi")]
use super::mpi;
use super::rendezvous::Rendezvous;
use super::tcp::TcpLinks;
use super::tree::Tree;
use super::{Communicator, element};
use crate::CommError;
use frit_ir::DType;
use frit_ir::ops::ReduceKind;
use frit_ir::plan::Team;
use std::io::{self, ErrorKind};
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// One process's communicator.
#[derive(Clone)]
pub struct ProcessComm {
    shared: Rc<Shared>,
}

struct Shared {
    rank: usize,
    world: Team,
    timeout: Duration,
    control: Rendezvous,
    links: Box<dyn Links>,
    calls: AtomicU64,
    bytes: AtomicU64,
}

/// The payload; members must agree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Kind {
    AllGather = 1,
    ReduceScatter,
    AllReduce,
    Gather,
}

/// One exchange, from one rank.
pub(super) struct Exchange<'a, 'b> {
    /// The payload.
    pub kind: Kind,
    /// Which exchange of this rank it is, counted from 0.
    pub number: u64,
    /// This rank.
    pub rank: usize,
    /// The other members.
    pub others: &'a [usize],
    /// What each of them receives.
    pub send: &'a (dyn Fn(usize) -> &'b [u8] + Sync + 'a),
    /// Bytes that each of them sends.
    pub len: usize,
    /// Tells who failed.
    pub control: &'a Rendezvous,
    /// How long a member may say nothing.
    pub timeout: Duration,
}

/// How bytes travel between this rank and every other.
pub(super) trait Links {
    /// Sends to every other member, and receives from each, in their order.
    ///
    /// # Errors
    /// Who does not answer, and why.
    fn exchange(
        &self,
        exchange: &Exchange<'_, '_>,
        receive: &mut dyn FnMut(usize, &[u8]),
    ) -> Result<(), CommError>;

    /// All ranks are done.
    fn finish(self: Box<Self>);
}

impl Exchange<'_, '_> {
    /// Why a member does not answer: what failed first, as far as any rank knows.
    pub(super) fn lost(&self, rank: usize, error: &io::Error) -> CommError {
        if error.kind() == ErrorKind::TimedOut {
            let seconds = self.timeout.as_secs_f64();
            return CommError::Ranks {
                reason: format!("rank {rank} did not answer within {seconds} s"),
            };
        }
        // The word of who failed first may still be on its way.
        let end = Instant::now() + Duration::from_secs(1);
        while self.control.failure().is_none() && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(5));
        }
        let reason = self.control.failure();
        CommError::Ranks {
            reason: reason.unwrap_or_else(|| format!("rank {rank} ended ({error})")),
        }
    }
}

impl ProcessComm {
    /// Connects all processes of the job, which must have the same `identity`, pairwise.
    ///
    /// # Errors
    /// Which rank did not connect, has another identity, or cannot be reached.
    pub fn connect(
        launch: &Launch,
        identity: &str,
        timeout: Duration,
    ) -> Result<ProcessComm, CommError> {
        #[cfg(feature = "mpi")]
        if launch.by_mpirun {
            let links = mpi::MpiLinks::initialize(launch)?;
            let (launch_there, secret) = (links.launch(launch), links.secret());
            let control = Rendezvous::meet_with(&launch_there, &secret, identity, timeout)?;
            return ProcessComm::new(control, launch, timeout, Box::new(links));
        }
        let mut control = Rendezvous::meet(launch, identity, timeout)?;
        let links = TcpLinks::connect(&mut control, launch.world_size, timeout)?;
        ProcessComm::new(control, launch, timeout, Box::new(links))
    }

    fn new(
        control: Rendezvous,
        launch: &Launch,
        timeout: Duration,
        links: Box<dyn Links>,
    ) -> Result<ProcessComm, CommError> {
        control.watch()?;
        let world = Team { first: 0, stride: 1, count: launch.world_size };
        let (calls, bytes) = (AtomicU64::new(0), AtomicU64::new(0));
        let rank = launch.rank;
        let shared = Shared { rank, world, timeout, control, links, calls, bytes };
        Ok(ProcessComm { shared: Rc::new(shared) })
    }

    /// Reports that this rank is done, and waits until all others are.
    ///
    /// # Errors
    /// If another rank fails, or is not done in time.
    pub fn finish(self) -> Result<(), CommError> {
        let shared = Rc::into_inner(self.shared).expect("invariant: the device is gone");
        shared.control.finish()?;
        shared.links.finish();
        Ok(())
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
    ) -> Result<(), CommError> {
        let others: Vec<usize> = team.ranks().filter(|r| *r != self.rank).collect();
        let exchange = Exchange {
            kind,
            number: self.calls.fetch_add(1, Ordering::Relaxed),
            rank: self.rank,
            others: &others,
            send: &send,
            len,
            control: &self.control,
            timeout: self.timeout,
        };
        self.links.exchange(&exchange, &mut |rank, bytes| {
            if kind != Kind::Gather {
                self.bytes.fetch_add(bytes.len() as u64, Ordering::Relaxed);
            }
            receive(rank, bytes);
        })
    }
}

/// The sum, mean or maximum over members, as bytes; `own` is this rank's operand, `received` are those of the other members.
fn combine_bytes(
    team: Team,
    rank: usize,
    own: &[u8],
    received: &[(usize, Vec<u8>)],
    dtype: DType,
    reduce: ReduceKind,
) -> Result<Vec<u8>, CommError> {
    let mut tree = Tree::new(reduce, team.count, own.len() / dtype.size());
    for member in team.ranks() {
        let of_other = received.iter().find(|(other, _)| *other == member);
        debug_assert!(of_other.is_some() || member == rank);
        let operand = element::widen(of_other.map_or(own, |(_, bytes)| bytes), dtype)?;
        tree.push(operand.len(), |to| {
            to.copy_from_slice(&operand);
            Ok::<(), CommError>(())
        })?;
    }
    let sum = tree.finish(own.len() / dtype.size());
    element::narrow(sum, dtype)
}

impl Communicator for ProcessComm {
    fn rank(&self) -> usize {
        self.shared.rank
    }

    unsafe fn all_gather(
        &self,
        team: Team,
        send: *const u8,
        recv: *mut u8,
        bytes: usize,
    ) -> Result<(), CommError> {
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
    ) -> Result<(), CommError> {
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
    ) -> Result<(), CommError> {
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

    fn gather(&self, send: &[u8]) -> Result<Vec<u8>, CommError> {
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

    fn largest(&self, value: u64) -> Result<u64, CommError> {
        self.shared.control.largest(value)
    }

    fn abort(&self) {
        self.shared.control.fail(&format!("rank {} failed", self.shared.rank));
    }
}
