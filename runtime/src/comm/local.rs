//! Ranks as threads of one process: they read each other's buffers between barriers.
//!
//! # Numerics
//! Each element is summed in f32 in rank order, whatever the layout, then divided for a mean.

use super::Communicator;
use crate::RunError;
use frit_ir::ops::ReduceKind;
use frit_ir::plan::Team;
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};

/// What was exchanged so far, summed over ranks.
#[derive(Debug, Default)]
pub struct Traffic {
    /// Calls of any collective.
    pub calls: AtomicU64,
    /// Bytes that ranks read from others.
    pub bytes: AtomicU64,
}

struct Shared {
    world_size: usize,
    send: Vec<AtomicPtr<u8>>,
    recv: Vec<AtomicPtr<u8>>,
    value: Vec<AtomicU64>,
    gate: Mutex<Gate>,
    opened: Condvar,
    traffic: Traffic,
}

#[derive(Default)]
struct Gate {
    waiting: usize,
    round: u64,
    aborted: bool,
}

/// One rank's end.
#[derive(Clone)]
pub struct LocalComm {
    rank: usize,
    shared: Arc<Shared>,
}

impl LocalComm {
    /// The ends of `world_size` ranks.
    pub fn world(world_size: usize) -> Vec<LocalComm> {
        let pointers = || (0..world_size).map(|_| AtomicPtr::default()).collect();
        let shared = Arc::new(Shared {
            world_size,
            send: pointers(),
            recv: pointers(),
            value: (0..world_size).map(|_| AtomicU64::default()).collect(),
            gate: Mutex::default(),
            opened: Condvar::new(),
            traffic: Traffic::default(),
        });
        (0..world_size).map(|rank| LocalComm { rank, shared: shared.clone() }).collect()
    }

    /// Calls and bytes so far.
    pub fn traffic(&self) -> (u64, u64) {
        let t = &self.shared.traffic;
        (t.calls.load(Ordering::Relaxed), t.bytes.load(Ordering::Relaxed))
    }

    fn gate(&self) -> std::sync::MutexGuard<'_, Gate> {
        self.shared.gate.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Waits for all ranks.
    fn barrier(&self) -> Result<(), RunError> {
        let mut gate = self.gate();
        gate.waiting += 1;
        if gate.waiting == self.shared.world_size {
            gate.waiting = 0;
            gate.round += 1;
            self.shared.opened.notify_all();
        } else {
            let round = gate.round;
            while gate.round == round && !gate.aborted {
                gate =
                    self.shared.opened.wait(gate).unwrap_or_else(|poisoned| poisoned.into_inner());
            }
        }
        if gate.aborted { Err(RunError::Aborted { rank: self.rank }) } else { Ok(()) }
    }

    fn publish(
        &self,
        team: Team,
        send: *const u8,
        recv: *mut u8,
        bytes: usize,
    ) -> Result<(), RunError> {
        self.shared.recv[self.rank].store(recv, Ordering::Release);
        self.shared.traffic.calls.fetch_add(1, Ordering::Relaxed);
        let others = (team.count - 1) as u64;
        self.shared.traffic.bytes.fetch_add(bytes as u64 * others, Ordering::Relaxed);
        self.show(send)
    }

    /// Shows the other ranks a buffer, and waits until all have shown theirs.
    fn show(&self, send: *const u8) -> Result<(), RunError> {
        self.shared.send[self.rank].store(send.cast_mut(), Ordering::Release);
        self.barrier()
    }

    fn sent(&self, rank: usize) -> *const u8 {
        self.shared.send[rank].load(Ordering::Acquire)
    }

    /// The combination of elements `begin..begin + len` of every team member's send buffer.
    ///
    /// # Safety
    /// Every member has published a buffer of at least `begin + len` f32, which nothing writes.
    unsafe fn combine(&self, team: Team, begin: usize, out: &mut [f32], reduce: ReduceKind) {
        for rank in team.ranks() {
            // SAFETY: by the contract of this function.
            let part = unsafe {
                std::slice::from_raw_parts(self.sent(rank).cast::<f32>().add(begin), out.len())
            };
            if rank == team.first {
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
}

impl Communicator for LocalComm {
    fn rank(&self) -> usize {
        self.rank
    }

    unsafe fn all_gather(
        &self,
        team: Team,
        send: *const u8,
        recv: *mut u8,
        bytes: usize,
    ) -> Result<(), RunError> {
        self.publish(team, send, recv, bytes)?;
        for (i, rank) in team.ranks().enumerate() {
            // SAFETY: every member published `bytes` bytes, and `recv` has room for all of them.
            unsafe {
                std::ptr::copy_nonoverlapping(self.sent(rank), recv.add(i * bytes), bytes);
            }
        }
        self.barrier()
    }

    unsafe fn reduce_scatter(
        &self,
        team: Team,
        send: *const f32,
        recv: *mut f32,
        len: usize,
        reduce: ReduceKind,
    ) -> Result<(), RunError> {
        self.publish(team, send.cast(), recv.cast(), len * 4)?;
        // SAFETY: `recv` has `len` elements, and every rank published `len` for every rank.
        unsafe {
            let out = std::slice::from_raw_parts_mut(recv, len);
            self.combine(team, team.position(self.rank) * len, out, reduce);
        }
        self.barrier()
    }

    unsafe fn all_reduce(
        &self,
        team: Team,
        send: *const f32,
        recv: *mut f32,
        len: usize,
        reduce: ReduceKind,
    ) -> Result<(), RunError> {
        let (n, k) = (team.count, team.position(self.rank));
        let (begin, end) = (k * len / n, (k + 1) * len / n);
        self.publish(team, send.cast(), recv.cast(), 2 * (end - begin) * 4)?;
        // The result may replace what others still read: it is kept aside until all have read.
        let mut part = vec![0.0; end - begin];
        // SAFETY: every rank published `len` elements.
        unsafe { self.combine(team, begin, &mut part, reduce) };
        self.barrier()?;
        for rank in team.ranks() {
            let to = self.shared.recv[rank].load(Ordering::Acquire).cast::<f32>();
            // SAFETY: every rank published room for `len` elements; ranks write disjoint parts.
            unsafe { std::ptr::copy_nonoverlapping(part.as_ptr(), to.add(begin), part.len()) };
        }
        self.barrier()
    }

    fn gather(&self, send: &[u8]) -> Result<Vec<u8>, RunError> {
        self.show(send.as_ptr())?;
        let mut all = Vec::new();
        if self.rank == 0 {
            for rank in 0..self.shared.world_size {
                // SAFETY: every rank shows as many bytes, and keeps them until all have passed the barrier.
                all.extend(unsafe { std::slice::from_raw_parts(self.sent(rank), send.len()) });
            }
        }
        self.barrier()?;
        Ok(all)
    }

    fn largest(&self, value: u64) -> Result<u64, RunError> {
        self.shared.value[self.rank].store(value, Ordering::Release);
        self.barrier()?;
        let values = self.shared.value.iter().map(|v| v.load(Ordering::Acquire));
        let largest = values.max().unwrap_or(value);
        self.barrier()?;
        Ok(largest)
    }

    fn abort(&self) {
        self.gate().aborted = true;
        self.shared.opened.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn on_ranks<T: Send>(n: usize, f: impl Fn(LocalComm) -> T + Sync) -> Vec<T> {
        let comms = LocalComm::world(n);
        std::thread::scope(|scope| {
            let handles: Vec<_> = comms.into_iter().map(|c| scope.spawn(|| f(c))).collect();
            handles.into_iter().map(|h| h.join().unwrap()).collect()
        })
    }

    fn world(count: usize) -> Team {
        Team { first: 0, stride: 1, count }
    }

    #[test]
    fn teams_exchange_among_themselves() {
        let results = on_ranks(6, |comm| {
            let (rank, send) = (comm.rank(), [comm.rank() as f32]);
            let neighbors = Team { first: rank / 3 * 3, stride: 1, count: 3 };
            let across = Team { first: rank % 3, stride: 3, count: 2 };
            let (mut gathered, mut sum) = ([0.0_f32; 3], [0.0_f32]);
            // SAFETY: sizes fit.
            unsafe {
                comm.all_gather(neighbors, send.as_ptr().cast(), gathered.as_mut_ptr().cast(), 4)
                    .unwrap();
                comm.all_reduce(across, send.as_ptr(), sum.as_mut_ptr(), 1, ReduceKind::Sum)
                    .unwrap();
            }
            (gathered, sum[0])
        });
        for (rank, (gathered, sum)) in results.into_iter().enumerate() {
            let first = (rank / 3 * 3) as f32;
            assert_eq!(gathered, [first, first + 1.0, first + 2.0]);
            assert_eq!(sum, (rank % 3 * 2 + 3) as f32);
        }
    }

    #[test]
    fn gather_concatenates_in_rank_order() {
        let results = on_ranks(3, |comm| {
            let send = [comm.rank() as f32 * 10.0, comm.rank() as f32 * 10.0 + 1.0];
            let mut recv = [0.0_f32; 6];
            // SAFETY: sizes fit.
            unsafe { comm.all_gather(world(3), send.as_ptr().cast(), recv.as_mut_ptr().cast(), 8) }
                .unwrap();
            recv
        });
        assert!(results.iter().all(|r| *r == [0.0, 1.0, 10.0, 11.0, 20.0, 21.0]));
    }

    #[test]
    fn reduce_scatter_gives_each_rank_its_mean() {
        let results = on_ranks(3, |comm| {
            let send: Vec<f32> = (0..6).map(|i| (i + comm.rank()) as f32).collect();
            let mut recv = [0.0_f32; 2];
            // SAFETY: sizes fit.
            unsafe {
                comm.reduce_scatter(world(3), send.as_ptr(), recv.as_mut_ptr(), 2, ReduceKind::Mean)
            }
            .unwrap();
            recv
        });
        assert_eq!(results, [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]);
    }

    #[test]
    fn all_reduce_works_in_place_on_sizes_that_do_not_divide() {
        let results = on_ranks(3, |comm| {
            let mut data: Vec<f32> = (0..7).map(|i| (i * (comm.rank() + 1)) as f32).collect();
            let p = data.as_mut_ptr();
            // SAFETY: sizes fit; in place is allowed.
            unsafe { comm.all_reduce(world(3), p, p, 7, ReduceKind::Sum) }.unwrap();
            data
        });
        let expected: Vec<f32> = (0..7).map(|i| (i * 6) as f32).collect();
        assert!(results.iter().all(|r| *r == expected));
    }

    #[test]
    fn gathering_is_not_counted_as_traffic() {
        let results = on_ranks(3, |comm| {
            let all = comm.gather(&[comm.rank() as u8; 2]).unwrap();
            (all, comm.traffic())
        });
        assert_eq!(results[0], (vec![0, 0, 1, 1, 2, 2], (0, 0)));
        assert!(results[1..].iter().all(|(all, _)| all.is_empty()));
    }

    #[test]
    fn a_rank_that_fails_releases_the_others() {
        let results = on_ranks(3, |comm| {
            if comm.rank() == 1 {
                comm.abort();
                return true;
            }
            let (send, mut recv) = ([0_u8; 4], [0_u8; 12]);
            // SAFETY: sizes fit.
            unsafe { comm.all_gather(world(3), send.as_ptr(), recv.as_mut_ptr(), 4) }.is_err()
        });
        assert_eq!(results, [true; 3]);
    }
}
