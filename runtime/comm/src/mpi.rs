//! Point-to-point messages between processes through MPI.
//!
//! Processes started by `mpirun` need no `MASTER_ADDR` and no secret: rank 0 broadcasts its address and a generated secret
//! through MPI.

use super::launch::Launch;
use super::processes::{Exchange, Links};
use super::secret::{self, PROOF, Secret};
use crate::CommError;
use mpi::collective::SystemOperation;
use mpi::environment::{Universe, processor_name};
use mpi::point_to_point::{Destination, Source};
use mpi::request::{Request, StaticScope};
use mpi::topology::SimpleCommunicator;
use mpi::traits::{Communicator, CommunicatorCollectives, Root};
use mpi::{Tag, Threading};
use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::mem::ManuallyDrop;
use std::net::TcpListener;
use std::time::{Duration, Instant};

/// Minimum number of tags of every MPI; exchanges use them cyclically.
const TAGS: u64 = 32_768;
/// Maximum bytes of a message; MPI counts in `i32`.
const LONGEST: usize = 1 << 30;
/// Bytes for the name of a machine.
const NAME: usize = 256;
/// Number of polls without sleeping, then the sleep between polls.
const EAGER_LOOKS: usize = 2_000;
const PAUSE: Duration = Duration::from_micros(50);
/// Additional wait per missing rank: a rank that hangs keeps others from answering, and ranks that miss only it should
/// report first.
const DEFERENCE: Duration = Duration::from_millis(500);

/// All ranks of a job that `mpirun` started.
pub(super) struct MpiLinks {
    world: SimpleCommunicator,
    /// Finalizes MPI on drop, which needs all ranks; not dropped after a failure.
    universe: ManuallyDrop<Universe>,
    /// Where rank 0 listens.
    master: (String, u16),
    /// The secret of the job.
    secret: Secret,
}

impl MpiLinks {
    /// Starts MPI, and finds rank 0.
    ///
    /// # Errors
    /// If MPI's ranks differ from the launcher's.
    pub(super) fn initialize(launch: &Launch) -> Result<MpiLinks, CommError> {
        let started = mpi::initialize_with_threading(Threading::Serialized);
        let (universe, _) =
            started.ok_or_else(|| CommError::from("MPI runs already".to_string()))?;
        let world = universe.world();
        let (rank, size) = (world.rank() as usize, world.size() as usize);
        if (rank, size) != (launch.rank, launch.world_size) {
            return Err(CommError::from(format!(
                "MPI says that this is rank {rank} of {size}, mpirun that it is rank {} of {}; is `mpirun` of \
                 another MPI than this program was built with?",
                launch.rank, launch.world_size
            )));
        }
        let own = processor_name().unwrap_or_else(|_| "localhost".into());
        let mut said = [0_u8; NAME + 2 + PROOF];
        if rank == 0 {
            let port = TcpListener::bind(("0.0.0.0", 0)).and_then(|l| l.local_addr());
            let port =
                port.map_err(|e| CommError::from(format!("rank 0 finds no port: {e}")))?.port();
            let secret = Secret::random();
            let secret =
                secret.map_err(|e| CommError::from(format!("rank 0 finds no secret: {e}")))?;
            let name = &own.as_bytes()[..own.len().min(NAME)];
            said[..name.len()].copy_from_slice(name);
            said[NAME..NAME + 2].copy_from_slice(&port.to_le_bytes());
            said[NAME + 2..].copy_from_slice(secret.bytes());
        }
        world.process_at_rank(0).broadcast_into(&mut said[..]);
        let name = String::from_utf8_lossy(&said[..NAME]).trim_end_matches('\0').to_string();
        let port = u16::from_le_bytes([said[NAME], said[NAME + 1]]);
        let mut together = 0_i32;
        world.all_reduce_into(&i32::from(name == own), &mut together, SystemOperation::min());
        let host = match (together == 1, rank) {
            (true, _) => "127.0.0.1".into(),
            // The name of a machine may not resolve to itself, so rank 0 listens at all its addresses.
            (false, 0) => "0.0.0.0".into(),
            (false, _) => name,
        };
        let secret = Secret::from_bytes(&said[NAME + 2..]);
        Ok(MpiLinks { world, universe: ManuallyDrop::new(universe), master: (host, port), secret })
    }

    /// The secret that rank 0 broadcast.
    pub(super) fn secret(&self) -> secret::SecretSource {
        secret::SecretSource::Known(self.secret.clone())
    }

    /// The launch, with the address of rank 0.
    pub(super) fn launch(&self, launch: &Launch) -> Launch {
        let master = launch.master.clone().or_else(|| Some(self.master.clone()));
        Launch { master, ..launch.clone() }
    }
}

/// Memory that MPI reads or writes. If an exchange fails it is leaked, because MPI may still access it.
struct Message(&'static mut [u8]);

impl Message {
    fn new(bytes: Vec<u8>) -> Message {
        Message(Box::leak(bytes.into_boxed_slice()))
    }

    /// # Safety
    /// Nothing may refer to the message any more.
    unsafe fn free(self) -> Box<[u8]> {
        // SAFETY: it was made by `Box::leak`; by the contract this is the only reference.
        unsafe { Box::from_raw(self.0) }
    }

    /// The same memory in pieces that MPI can count.
    ///
    /// # Safety
    /// The pieces must not be used after the message is freed, nor while it is borrowed otherwise.
    unsafe fn pieces(&mut self) -> impl Iterator<Item = &'static mut [u8]> {
        let (begin, len) = (self.0.as_mut_ptr(), self.0.len());
        // SAFETY: the memory is leaked and so lives as long as is asked; the contract keeps it unshared.
        unsafe { std::slice::from_raw_parts_mut(begin, len) }.chunks_mut(LONGEST)
    }
}

/// A pending message from or to a rank.
struct Pending {
    rank: usize,
    request: Request<'static, [u8], StaticScope>,
}

/// Waits until all have arrived. Pending ones are leaked on failure.
fn wait(mut pending: Vec<Pending>, exchange: &Exchange<'_, '_>) -> Result<(), CommError> {
    let (mut begin, mut looks) = (Instant::now(), 0);
    loop {
        let before = pending.len();
        pending = pending
            .into_iter()
            .filter_map(|p| p.request.test().err().map(|request| Pending { request, ..p }))
            .collect();
        let Some(first) = pending.first() else { return Ok(()) };
        if pending.len() < before {
            (begin, looks) = (Instant::now(), 0);
            continue;
        }
        looks += 1;
        if looks > EAGER_LOOKS {
            std::thread::sleep(PAUSE);
        } else {
            std::thread::yield_now();
        }
        let failed = exchange.control.failure().is_some();
        let silent = pending.iter().map(|p| p.rank).collect::<BTreeSet<usize>>().len();
        if failed || begin.elapsed() > exchange.timeout + DEFERENCE * (silent as u32 - 1) {
            let kind = if failed { ErrorKind::ConnectionAborted } else { ErrorKind::TimedOut };
            let error = exchange.lost(first.rank, &kind.into());
            pending.into_iter().for_each(|p| std::mem::forget(p.request));
            exchange.control.fail(&error.to_string());
            return Err(error);
        }
    }
}

impl Links for MpiLinks {
    fn exchange(
        &self,
        exchange: &Exchange<'_, '_>,
        receive: &mut dyn FnMut(usize, &[u8]),
    ) -> Result<(), CommError> {
        let tag = (exchange.number % TAGS) as Tag;
        let others = exchange.others;
        let mut received: Vec<Message> =
            others.iter().map(|_| Message::new(vec![0; exchange.len])).collect();
        let mut sent: Vec<Message> =
            others.iter().map(|rank| Message::new((exchange.send)(*rank).to_vec())).collect();
        let mut pending = Vec::new();
        for (&rank, message) in others.iter().zip(&mut received) {
            let peer = self.world.process_at_rank(rank as i32);
            // SAFETY: `wait` ends all use of the pieces, or the messages are not freed.
            for piece in unsafe { message.pieces() } {
                let request = peer.immediate_receive_into_with_tag(StaticScope, piece, tag);
                pending.push(Pending { rank, request });
            }
        }
        for (&rank, message) in others.iter().zip(&mut sent) {
            let peer = self.world.process_at_rank(rank as i32);
            // SAFETY: as above.
            for piece in unsafe { message.pieces() } {
                let request = peer.immediate_send_with_tag(StaticScope, &*piece, tag);
                pending.push(Pending { rank, request });
            }
        }
        wait(pending, exchange)?;
        for (&rank, message) in others.iter().zip(received) {
            // SAFETY: MPI is done with it.
            receive(rank, &unsafe { message.free() });
        }
        for message in sent {
            // SAFETY: MPI is done with it.
            drop(unsafe { message.free() });
        }
        Ok(())
    }

    fn finish(mut self: Box<Self>) {
        // SAFETY: `self` is consumed; the universe is dropped once.
        unsafe { ManuallyDrop::drop(&mut self.universe) };
    }
}
