//! Communicator for ranks that are threads of one process: they read each other's buffers between barriers.
//!
//! # Numerics
//! Each element is summed in f32 in one order of ranks for any layout ([`Tree`]), divided for a mean, and rounded once to f16 or bf16.

use super::Communicator;
use crate::CommError;
use crate::tree::Tree;
use frit_ir::DType;
use frit_ir::ops::ReduceKind;
use frit_ir::plan::Team;
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};

/// Elements that are combined at a time.
const BLOCK: usize = 2048;

/// Communication volume so far, summed over ranks.
#[derive(Debug, Default)]
pub struct Traffic {
    /// Number of collective calls.
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

/// One rank's communicator.
#[derive(Clone)]
pub struct LocalComm {
    rank: usize,
    shared: Arc<Shared>,
}

impl LocalComm {
    /// The communicators of `world_size` ranks.
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
    fn barrier(&self) -> Result<(), CommError> {
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
        if gate.aborted { Err(CommError::Aborted { rank: self.rank }) } else { Ok(()) }
    }

    fn publish(
        &self,
        team: Team,
        send: *const u8,
        recv: *mut u8,
        bytes: usize,
    ) -> Result<(), CommError> {
        self.shared.recv[self.rank].store(recv, Ordering::Release);
        self.shared.traffic.calls.fetch_add(1, Ordering::Relaxed);
        let others = (team.count - 1) as u64;
        self.shared.traffic.bytes.fetch_add(bytes as u64 * others, Ordering::Relaxed);
        self.show(send)
    }

    /// Publishes a buffer to the other ranks, and waits until all have published theirs.
    fn show(&self, send: *const u8) -> Result<(), CommError> {
        self.shared.send[self.rank].store(send.cast_mut(), Ordering::Release);
        self.barrier()
    }

    fn sent(&self, rank: usize) -> *const u8 {
        self.shared.send[rank].load(Ordering::Acquire)
    }

    /// The combination of elements `begin..begin + len` of every team member's send buffer.
    ///
    /// # Safety
    /// Every member has published a buffer of at least `begin + len` elements of `dtype`, which nothing
    /// writes; `out` has room for `len` of them.
    unsafe fn combine(
        &self,
        team: Team,
        begin: usize,
        out: *mut u8,
        (len, dtype): (usize, DType),
        reduce: ReduceKind,
    ) -> Result<(), CommError> {
        let mut tree = Tree::new(reduce, team.count, BLOCK.min(len));
        for first in (0..len).step_by(BLOCK) {
            let len = BLOCK.min(len - first);
            for rank in team.ranks() {
                // SAFETY: by the contract of this function.
                tree.push(len, |to| unsafe {
                    let from = self.sent(rank).add((begin + first) * dtype.size());
                    match dtype {
                        DType::F32 => to.copy_from_slice(slice(from, len)),
                        DType::F16 => slice::<f16>(from, len).convert_to_f32_slice(to),
                        DType::BF16 => slice::<bf16>(from, len).convert_to_f32_slice(to),
                        other => return Err(CommError::Exchange { dtype: other }),
                    }
                    Ok(())
                })?;
            }
            let sum = tree.finish(len);
            // SAFETY: as above.
            unsafe {
                let out = out.add(first * dtype.size());
                match dtype {
                    DType::F16 => slice_mut::<f16>(out, len).convert_from_f32_slice(sum),
                    DType::BF16 => slice_mut::<bf16>(out, len).convert_from_f32_slice(sum),
                    _ => slice_mut(out, len).copy_from_slice(sum),
                }
            }
        }
        Ok(())
    }
}

/// # Safety
/// There are `len` elements at `at`, aligned, which nothing writes meanwhile.
unsafe fn slice<'a, T>(at: *const u8, len: usize) -> &'a [T] {
    // SAFETY: by the contract of this function.
    unsafe { std::slice::from_raw_parts(at.cast(), len) }
}

/// # Safety
/// There is room for `len` elements at `at`, aligned, which nothing else uses meanwhile.
unsafe fn slice_mut<'a, T>(at: *mut u8, len: usize) -> &'a mut [T] {
    // SAFETY: by the contract of this function.
    unsafe { std::slice::from_raw_parts_mut(at.cast(), len) }
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
    ) -> Result<(), CommError> {
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
        send: *const u8,
        recv: *mut u8,
        (len, dtype): (usize, DType),
        reduce: ReduceKind,
    ) -> Result<(), CommError> {
        self.publish(team, send, recv, len * dtype.size())?;
        let begin = team.position(self.rank) * len;
        // SAFETY: `recv` has `len` elements, and every member published `len` for every member.
        unsafe { self.combine(team, begin, recv, (len, dtype), reduce)? };
        self.barrier()
    }

    unsafe fn all_reduce(
        &self,
        team: Team,
        send: *const u8,
        recv: *mut u8,
        (len, dtype): (usize, DType),
        reduce: ReduceKind,
    ) -> Result<(), CommError> {
        let (n, k) = (team.count, team.position(self.rank));
        let (begin, end) = (k * len / n, (k + 1) * len / n);
        let bytes = (end - begin) * dtype.size();
        self.publish(team, send, recv, 2 * bytes)?;
        // The result may overwrite a buffer that others still read, so it is stored separately until all have read.
        // Words keep it aligned.
        let mut part = vec![0_u32; bytes.div_ceil(4)];
        let kept = part.as_mut_ptr().cast::<u8>();
        // SAFETY: every member published `len` elements; there is room for those of this rank.
        unsafe { self.combine(team, begin, kept, (end - begin, dtype), reduce)? };
        self.barrier()?;
        for rank in team.ranks() {
            let to = self.shared.recv[rank].load(Ordering::Acquire);
            // SAFETY: every member published room for `len` elements; ranks write disjoint parts.
            unsafe { std::ptr::copy_nonoverlapping(kept, to.add(begin * dtype.size()), bytes) };
        }
        self.barrier()
    }

    fn gather(&self, send: &[u8]) -> Result<Vec<u8>, CommError> {
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

    fn largest(&self, value: u64) -> Result<u64, CommError> {
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
                let (from, to) = (send.as_ptr().cast(), sum.as_mut_ptr().cast());
                comm.all_reduce(across, from, to, (1, DType::F32), ReduceKind::Sum).unwrap();
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
            let (from, to) = (send.as_ptr().cast(), recv.as_mut_ptr().cast());
            // SAFETY: sizes fit.
            unsafe { comm.reduce_scatter(world(3), from, to, (2, DType::F32), ReduceKind::Mean) }
                .unwrap();
            recv
        });
        assert_eq!(results, [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]);
    }

    #[test]
    fn all_reduce_works_in_place_on_sizes_that_do_not_divide() {
        let results = on_ranks(3, |comm| {
            let mut data: Vec<f32> = (0..7).map(|i| (i * (comm.rank() + 1)) as f32).collect();
            let p = data.as_mut_ptr().cast();
            // SAFETY: sizes fit; in place is allowed.
            unsafe { comm.all_reduce(world(3), p, p, (7, DType::F32), ReduceKind::Sum) }.unwrap();
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
    fn low_precision_is_summed_in_f32_and_rounded_once() {
        let results = on_ranks(3, |comm| {
            // In bf16 1 + 2⁻⁸ rounds to 1 every time; the sum of all is 1 + 2⁻⁷.
            let x = if comm.rank() == 0 { 1.0 } else { 1.0 / 256.0 };
            let mut data = [bf16::from_f32(x); 5];
            let p = data.as_mut_ptr().cast();
            // SAFETY: sizes fit; in place is allowed.
            unsafe { comm.all_reduce(world(3), p, p, (5, DType::BF16), ReduceKind::Sum) }.unwrap();
            let send = [f16::from_f32(40000.0); 6];
            let mut recv = [f16::ZERO; 2];
            let (from, to) = (send.as_ptr().cast(), recv.as_mut_ptr().cast());
            // SAFETY: sizes fit.
            unsafe { comm.reduce_scatter(world(3), from, to, (2, DType::F16), ReduceKind::Sum) }
                .unwrap();
            (data.map(bf16::to_f32), recv.map(f16::to_f32))
        });
        assert!(results.iter().all(|r| *r == ([1.0078125; 5], [f32::INFINITY; 2])));
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
