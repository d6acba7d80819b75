//! A pool of persistent worker threads with scratch memory for kernels.
//!
//! One pool belongs to one rank. [`Pool::run`] hands out chunk numbers from an atomic counter, the caller takes part, and the call
//! returns when all chunks are done. Idle workers spin for some microseconds, then park; the caller never waits for a worker that has
//! not joined the job, so a busy machine does not add wake-up latency.

use crate::memory::Memory;
use std::alloc::{Layout, handle_alloc_error};
use std::any::Any;
use std::cell::{Cell, UnsafeCell};
use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

/// Spins of an idle worker before it parks: some tens of microseconds.
const SPINS: usize = 2000;

/// Alignment of scratch memory, and the slack after each of its parts.
const ALIGN: usize = 64;

/// Low bits of [`Shared::state`]: the number of workers inside the job.
const ACTIVE: u64 = 0xffff;
/// The job accepts workers.
const OPEN: u64 = 0x1_0000;
/// One step of the job number.
const EPOCH: u64 = 0x2_0000;

/// A job as the workers see it: chunk number and the worker's own scratch memory.
type Body<'a> = dyn Fn(usize, &mut Worker) + Sync + 'a;

/// Worker threads that run the chunks of one call at a time.
///
/// A pool may be moved between threads but not shared (it is `Send`, not `Sync`): one call runs at
/// a time, and a chunk cannot start another one. Dropping it ends the threads.
pub struct Pool {
    shared: Arc<Shared>,
    handles: Vec<JoinHandle<()>>,
    /// Scratch memory shared by all threads of one call; owned by the calling thread.
    common: UnsafeCell<Scratch>,
    busy: Cell<bool>,
    bytes: Arc<AtomicUsize>,
    not_sync: PhantomData<Cell<()>>,
}

struct Shared {
    /// Job number, [`OPEN`] bit and count of active workers.
    state: AtomicU64,
    /// The next chunk of the current job.
    next: AtomicUsize,
    job: UnsafeCell<Job>,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    quit: AtomicBool,
    sleeping: Vec<AtomicBool>,
    /// Scratch memory per thread; entry 0 belongs to the caller.
    workers: Vec<UnsafeCell<Worker>>,
}

#[derive(Clone, Copy)]
struct Job {
    body: *const Body<'static>,
    n_chunks: usize,
}

// SAFETY: `job` is written only while no worker is active and the job is closed; `workers[i]` is
// touched by thread i alone. The pointers inside are valid while the job is open.
unsafe impl Sync for Shared {}
// SAFETY: as above.
unsafe impl Send for Shared {}

impl Pool {
    /// A pool that runs on `threads` threads, the caller included (at least one).
    pub fn new(threads: usize) -> Pool {
        let threads = threads.clamp(1, ACTIVE as usize);
        let bytes = Arc::new(AtomicUsize::new(0));
        let shared = Arc::new(Shared {
            state: AtomicU64::new(0),
            next: AtomicUsize::new(0),
            job: UnsafeCell::new(Job { body: &|_: usize, _: &mut Worker| {}, n_chunks: 0 }),
            panic: Mutex::new(None),
            quit: AtomicBool::new(false),
            sleeping: (1..threads).map(|_| AtomicBool::new(false)).collect(),
            workers: (0..threads).map(|_| UnsafeCell::new(Worker::new(&bytes))).collect(),
        });
        let handles = (1..threads)
            .map(|index| {
                let shared = Arc::clone(&shared);
                std::thread::Builder::new()
                    .name(format!("frit-kernels-{index}"))
                    .spawn(move || shared.work(index))
                    .expect("the system refused a worker thread")
            })
            .collect();
        let common = UnsafeCell::new(Scratch::new(&bytes));
        Pool { shared, handles, common, busy: Cell::new(false), bytes, not_sync: PhantomData }
    }

    /// The number of threads, the caller included.
    pub fn threads(&self) -> usize {
        self.handles.len() + 1
    }

    /// Bytes of scratch memory that the kernels have claimed so far through this pool. It only
    /// grows. (The crate `gemm` keeps a further small packing buffer per thread.)
    pub fn scratch_bytes(&self) -> usize {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Runs `body(chunk)` for each chunk in `0..n_chunks` and returns when all are done.
    ///
    /// Chunks run in any order on any thread. If one panics, the chunks not yet begun are dropped
    /// and the panic continues in the caller; the pool stays usable.
    pub fn run(&self, n_chunks: usize, body: &(dyn Fn(usize) + Sync)) {
        self.run_workers(n_chunks, &|chunk, _| body(chunk));
    }

    /// As [`Pool::run`], with the scratch memory of the thread that runs the chunk.
    pub(crate) fn run_workers(&self, n_chunks: usize, body: &Body<'_>) {
        assert!(!self.busy.get(), "a pool cannot be used from inside its own chunks");
        self.busy.set(true);
        let release = Release(&self.busy);
        if self.handles.is_empty() || n_chunks <= 1 {
            // SAFETY: entry 0 belongs to the caller, and `busy` excludes a second borrow.
            let worker = unsafe { &mut *self.shared.workers[0].get() };
            for chunk in 0..n_chunks {
                body(chunk, worker);
            }
            return;
        }
        self.shared.run(n_chunks, body, &self.handles);
        drop(release);
    }

    /// Claims parts of the memory that all threads of the next calls may use, as in
    /// [`Scratch::split`]. The parts are valid until this is called again.
    pub(crate) fn common<const N: usize>(&self, bytes: [usize; N]) -> [*mut u8; N] {
        // SAFETY: the pool is not `Sync`, and no reference into the cell outlives this call.
        unsafe { (*self.common.get()).split(bytes) }
    }
}

/// Clears the busy flag, also when a chunk panics.
struct Release<'a>(&'a Cell<bool>);

impl Drop for Release<'_> {
    fn drop(&mut self) {
        self.0.set(false);
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.quit.store(true, Ordering::SeqCst);
        for handle in self.handles.drain(..) {
            handle.thread().unpark();
            // A worker catches the panics of its chunks, so joining cannot fail.
            let _ = handle.join();
        }
    }
}

impl Shared {
    fn run(&self, n_chunks: usize, body: &Body<'_>, handles: &[JoinHandle<()>]) {
        // SAFETY: the lifetime is erased, but no worker holds the job after this function returns;
        // no worker is active now, so the cell may be written.
        unsafe {
            let body = std::mem::transmute::<*const Body<'_>, *const Body<'static>>(body);
            *self.job.get() = Job { body, n_chunks };
        }
        self.next.store(0, Ordering::Relaxed);
        self.state.fetch_add(EPOCH + OPEN, Ordering::SeqCst);
        for (sleeping, handle) in self.sleeping.iter().zip(handles).take(n_chunks - 1) {
            if sleeping.swap(false, Ordering::SeqCst) {
                handle.thread().unpark();
            }
        }
        self.take_chunks(0);
        self.state.fetch_sub(OPEN, Ordering::SeqCst);
        let mut spins = 0;
        while self.state.load(Ordering::Acquire) & ACTIVE != 0 {
            spins += 1;
            if spins < SPINS {
                std::hint::spin_loop();
            } else {
                std::thread::yield_now();
            }
        }
        let panic = self.panic.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(payload) = panic {
            resume_unwind(payload);
        }
    }

    /// Runs chunks until none is left. A panic is stored for the caller.
    fn take_chunks(&self, index: usize) {
        // SAFETY: the thread is inside the open job, so the job is not being written and its body
        // is alive; `workers[index]` belongs to this thread.
        let (job, worker) = unsafe { (*self.job.get(), &mut *self.workers[index].get()) };
        let result = catch_unwind(AssertUnwindSafe(|| {
            loop {
                let chunk = self.next.fetch_add(1, Ordering::Relaxed);
                if chunk >= job.n_chunks {
                    break;
                }
                // SAFETY: as above.
                unsafe { (*job.body)(chunk, worker) };
            }
        }));
        if let Err(payload) = result {
            self.next.store(job.n_chunks, Ordering::Relaxed);
            let mut slot = self.panic.lock().unwrap_or_else(PoisonError::into_inner);
            slot.get_or_insert(payload);
        }
    }

    fn work(&self, index: usize) {
        let mut last = 0;
        let mut spins = 0;
        loop {
            let state = self.state.load(Ordering::SeqCst);
            let epoch = state & !(ACTIVE | OPEN);
            if state & OPEN != 0 && epoch != last {
                let joined = self.state.compare_exchange(
                    state,
                    state + 1,
                    Ordering::SeqCst,
                    Ordering::Relaxed,
                );
                if joined.is_ok() {
                    last = epoch;
                    self.take_chunks(index);
                    self.state.fetch_sub(1, Ordering::Release);
                    spins = 0;
                }
                continue;
            }
            if self.quit.load(Ordering::SeqCst) {
                return;
            }
            spins += 1;
            if spins < SPINS {
                std::hint::spin_loop();
                continue;
            }
            // Announce, check again, then park: a job opened in between sees the flag.
            let sleeping = &self.sleeping[index - 1];
            sleeping.store(true, Ordering::SeqCst);
            let now = self.state.load(Ordering::SeqCst);
            let idle = now & OPEN == 0 || now & !(ACTIVE | OPEN) == last;
            if idle && !self.quit.load(Ordering::SeqCst) {
                std::thread::park();
            }
            sleeping.store(false, Ordering::SeqCst);
            spins = 0;
        }
    }
}

/// The scratch memory of one thread.
pub(crate) struct Worker {
    /// Tiles of the kernel that runs.
    pub(crate) tiles: Scratch,
    /// Packed operands of its GEMMs.
    pub(crate) packing: Scratch,
}

impl Worker {
    fn new(bytes: &Arc<AtomicUsize>) -> Worker {
        Worker { tiles: Scratch::new(bytes), packing: Scratch::new(bytes) }
    }
}

/// Memory that grows on demand and is never cleared.
pub(crate) struct Scratch {
    memory: Option<Memory>,
    /// Total over the pool.
    bytes: Arc<AtomicUsize>,
}

impl Scratch {
    fn new(bytes: &Arc<AtomicUsize>) -> Scratch {
        Scratch { memory: None, bytes: Arc::clone(bytes) }
    }

    /// Parts of the given sizes, each aligned to 64 bytes and followed by at least 64 spare bytes,
    /// with undefined contents. They are valid until the next call.
    pub(crate) fn split<const N: usize>(&mut self, bytes: [usize; N]) -> [*mut u8; N] {
        let padded = bytes.map(|n| n.next_multiple_of(ALIGN) + ALIGN);
        let total = padded.iter().sum();
        if total > self.memory.as_ref().map_or(0, Memory::len) {
            self.release();
            let memory = Memory::zeroed(total, ALIGN);
            self.memory = Some(memory.unwrap_or_else(|| {
                handle_alloc_error(
                    Layout::from_size_align(total, ALIGN).unwrap_or(Layout::new::<u8>()),
                )
            }));
            self.bytes.fetch_add(total, Ordering::Relaxed);
        }
        let mut next = self.memory.as_ref().map_or(std::ptr::null_mut(), Memory::start);
        padded.map(|n| {
            let part = next;
            next = next.wrapping_add(n);
            part
        })
    }

    fn release(&mut self) {
        if let Some(memory) = self.memory.take() {
            self.bytes.fetch_sub(memory.len(), Ordering::Relaxed);
        }
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        self.release();
    }
}

/// A pointer that chunks on several threads may use. Its user guarantees disjoint writes.
#[derive(Clone, Copy)]
pub(crate) struct Shareable<T>(T);

// SAFETY: dereferencing is unsafe, and each user states why its writes are disjoint.
unsafe impl<T> Send for Shareable<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Shareable<T> {}

impl<T: Copy> Shareable<T> {
    pub(crate) fn new(pointer: T) -> Shareable<T> {
        Shareable(pointer)
    }

    pub(crate) fn get(&self) -> T {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_each_chunk_once() {
        for threads in [1, 2, 5] {
            let pool = Pool::new(threads);
            for n in [0, 1, 2, 7, 1000] {
                for _ in 0..20 {
                    let hits: Vec<AtomicUsize> = (0..n).map(|_| AtomicUsize::new(0)).collect();
                    pool.run(n, &|chunk| {
                        hits[chunk].fetch_add(1, Ordering::Relaxed);
                    });
                    assert!(hits.iter().all(|hit| hit.load(Ordering::Relaxed) == 1));
                }
            }
        }
    }

    #[test]
    fn wakes_parked_workers() {
        let pool = Pool::new(3);
        for _ in 0..5 {
            std::thread::sleep(std::time::Duration::from_millis(5));
            let sum = AtomicUsize::new(0);
            let seen = Mutex::new(std::collections::HashSet::new());
            pool.run(3, &|chunk| {
                sum.fetch_add(chunk, Ordering::Relaxed);
                seen.lock().unwrap().insert(std::thread::current().id());
                // Long enough for a parked worker to join.
                while chunk == 0 && seen.lock().unwrap().len() < 2 {
                    std::thread::yield_now();
                }
            });
            assert_eq!(sum.load(Ordering::Relaxed), 3);
            assert!(seen.lock().unwrap().len() >= 2);
        }
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_survives() {
        for threads in [1, 2, 4] {
            let pool = Pool::new(threads);
            for bad in [0, 3, 15] {
                let result = catch_unwind(AssertUnwindSafe(|| {
                    pool.run(16, &|chunk| assert!(chunk != bad, "chunk {bad} fails"));
                }));
                let payload = result.expect_err("the panic is lost");
                let text = payload.downcast_ref::<String>().expect("a formatted message");
                assert_eq!(text, &format!("chunk {bad} fails"));
                let count = AtomicUsize::new(0);
                pool.run(16, &|_| {
                    count.fetch_add(1, Ordering::Relaxed);
                });
                assert_eq!(count.load(Ordering::Relaxed), 16);
            }
        }
    }

    #[test]
    fn scratch_is_aligned_grows_and_is_counted() {
        let pool = Pool::new(1);
        assert_eq!(pool.scratch_bytes(), 0);
        let [a, b] = pool.common([10, 100]);
        assert_eq!((a as usize % 64, b as usize % 64), (0, 0));
        assert_eq!(b as usize - a as usize, 128);
        assert_eq!(pool.scratch_bytes(), 128 + 192);
        pool.common([1]);
        assert_eq!(pool.scratch_bytes(), 128 + 192);
        pool.common([1000]);
        assert_eq!(pool.scratch_bytes(), 1024 + 64);
    }
}
