//! NCCL collectives. Each team has one communicator for all streams, so that ranks cannot start its collectives in
//! different orders. It is non-blocking, so that a lost rank is noticed: the library launches from a thread of its own, and
//! the host waits until it has, before it puts anything else on the stream. Where the library refuses such communicators,
//! or is told to by `NCCL_COMM_BLOCKING=1`, its calls block; then only the library notices ranks that are lost meanwhile.

use super::driver::{Collective, Exchange, StreamHandle, TeamHandle};
use super::error::CudaError;
use super::library::{LibraryError, Wanted, functions};
use super::nvrtc::c_text;
use super::real::stream;
use cudarc::driver::sys::CUstream;
use cudarc::nccl::sys::{ncclComm_t, ncclDataType_t, ncclRedOp_t, ncclUniqueId};
use frit_ir::DType;
use frit_ir::ops::ReduceKind;
use frit_ir::plan::Team;
use std::cell::RefCell;
use std::ffi::{c_char, c_int, c_void};
use std::ptr::null_mut;
use std::time::{Duration, Instant};

/// The library.
pub(super) const LIBRARY: Wanted = Wanted {
    what: "NCCL",
    names: &["libnccl.so.2", "libnccl.so"],
    companion: None,
    remedy: "install NCCL 2.18 or later, or `pip install nvidia-nccl-cu12`",
};

/// The oldest version with non-blocking communicators that can be split.
const OLDEST: (u32, u32) = (2, 18);
const IN_PROGRESS: u32 = 7;
/// The time within which communicators should have been aborted.
const ABORT: Duration = Duration::from_secs(10);
/// Answers to a configuration that the library does not take: `ncclInvalidArgument`, `ncclInvalidUsage`. Nothing was sent
/// to other ranks before.
const REFUSED: [u32; 2] = [4, 5];

#[cfg(all(target_os = "linux", target_env = "gnu"))]
unsafe extern "C" {
    /// Registers what `exit` calls, with the exit code, before whatever was registered earlier.
    fn on_exit(call: extern "C" fn(c_int, *mut c_void), argument: *mut c_void) -> c_int;
}

/// Lets the process end without the exit handlers of NVIDIA's libraries, which wait for the GPU: there a collective may wait for
/// a rank that is lost.
fn skip_exit_handlers() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        extern "C" fn leave(code: c_int, _: *mut c_void) {
            // SAFETY: files are closed by the system; nothing else is left to do.
            unsafe { libc::_exit(code) }
        }
        static ONCE: std::sync::Once = std::sync::Once::new();
        // SAFETY: the function lives as long as the process. If it cannot be registered, the handlers run.
        ONCE.call_once(|| _ = unsafe { on_exit(leave, null_mut()) });
    }
}

/// `ncclConfig_t` as of version 2.14; later versions accept it by its size and version.
#[repr(C)]
pub(super) struct Config {
    size: usize,
    magic: u32,
    version: u32,
    blocking: c_int,
}

functions! {
    /// NCCL's functions.
    Api {
        ncclGetVersion: fn(*mut c_int) -> u32,
        ncclGetErrorString: fn(u32) -> *const c_char,
        ncclGetLastError: fn(ncclComm_t) -> *const c_char,
        ncclGetUniqueId: fn(*mut ncclUniqueId) -> u32,
        ncclCommInitRankConfig: fn(*mut ncclComm_t, c_int, ncclUniqueId, c_int, *mut Config) -> u32,
        ncclCommInitRank: fn(*mut ncclComm_t, c_int, ncclUniqueId, c_int) -> u32,
        ncclCommGetAsyncError: fn(ncclComm_t, *mut u32) -> u32,
        ncclCommAbort: fn(ncclComm_t) -> u32,
        ncclCommSplit: fn(ncclComm_t, c_int, c_int, *mut ncclComm_t, *mut Config) -> u32,
        ncclAllGather: fn(*const c_void, *mut c_void, usize, ncclDataType_t, ncclComm_t, CUstream) -> u32,
        ncclReduceScatter: fn(*const c_void, *mut c_void, usize, ncclDataType_t, ncclRedOp_t, ncclComm_t, CUstream) -> u32,
        ncclAllReduce: fn(*const c_void, *mut c_void, usize, ncclDataType_t, ncclRedOp_t, ncclComm_t, CUstream) -> u32,
        ncclSend: fn(*const c_void, usize, ncclDataType_t, c_int, ncclComm_t, CUstream) -> u32,
        ncclRecv: fn(*mut c_void, usize, ncclDataType_t, c_int, ncclComm_t, CUstream) -> u32,
        ncclGroupStart: fn() -> u32,
        ncclGroupEnd: fn() -> u32,
    }
}

type Result<T = ()> = std::result::Result<T, CudaError>;

/// NCCL, before ranks are connected.
pub struct Library {
    api: Api,
    /// Its path.
    pub(super) path: String,
    /// Its version.
    pub(super) version: (u32, u32, u32),
}

impl Library {
    /// Loads it.
    ///
    /// # Errors
    /// If it is missing or too old.
    pub fn open() -> std::result::Result<Library, LibraryError> {
        let loaded = LIBRARY.load()?;
        let api = Api::of(&loaded)?;
        let mut number: c_int = 0;
        // SAFETY: the pointer is valid. A version that cannot be told is zero.
        unsafe { (api.ncclGetVersion)(&mut number) };
        let number = number as u32;
        let version = (number / 10000, number % 10000 / 100, number % 100);
        if (version.0, version.1) < OLDEST {
            return Err(LibraryError::TooOld {
                path: loaded.path,
                symbol: "ncclCommSplit",
                remedy: LIBRARY.remedy,
            });
        }
        Ok(Library { api, path: loaded.path, version })
    }

    /// The unique id that rank 0 gives to all ranks.
    ///
    /// # Errors
    /// If NCCL finds no network.
    pub fn identity(&self) -> Result<Vec<u8>> {
        let mut id = ncclUniqueId { internal: [0; 128] };
        // SAFETY: the pointer is valid.
        let code = unsafe { (self.api.ncclGetUniqueId)(&mut id) };
        self.check("ncclGetUniqueId", code, null_mut())?;
        Ok(id.internal.iter().map(|b| b.cast_unsigned()).collect())
    }

    /// Joins the ranks that share an id; the device must be current. `failure` returns the failure of another rank.
    ///
    /// # Errors
    /// If NCCL refuses, a rank fails, or not all connect within `timeout`.
    pub fn join(
        self,
        identity: &[u8],
        rank: usize,
        world_size: usize,
        timeout: Duration,
        failure: impl Fn() -> Option<String>,
    ) -> Result<Nccl> {
        let mut id = ncclUniqueId { internal: [0; 128] };
        for (to, from) in id.internal.iter_mut().zip(identity) {
            *to = from.cast_signed();
        }
        let mut config =
            Config { size: size_of::<Config>(), magic: 0xcafe_beef, version: 21400, blocking: 0 };
        let mut communicator: ncclComm_t = null_mut();
        let (n, rank) = (world_size as c_int, rank as c_int);
        let mut call = "ncclCommInitRankConfig";
        // SAFETY: the pointers are valid; the identity is passed by value.
        let mut code = unsafe {
            (self.api.ncclCommInitRankConfig)(&mut communicator, n, id, rank, &mut config)
        };
        if REFUSED.contains(&code) {
            call = "ncclCommInitRank";
            // SAFETY: as above.
            code = unsafe { (self.api.ncclCommInitRank)(&mut communicator, n, id, rank) };
        }
        let communicators = RefCell::new(vec![communicator]);
        let nccl = Nccl { library: self, communicators, timeout };
        let settled = nccl.settle(call, code, communicator, failure);
        settled.inspect_err(|_| nccl.abort(|| (), || ()))?;
        Ok(nccl)
    }

    fn check(&self, call: &'static str, code: u32, communicator: ncclComm_t) -> Result {
        if code == 0 {
            return Ok(());
        }
        // SAFETY: the texts live as long as the library; the communicator is null or alive.
        let (what, last) = unsafe {
            let what = c_text((self.api.ncclGetErrorString)(code));
            (what, c_text((self.api.ncclGetLastError)(communicator)))
        };
        let last = last.trim();
        let reason = if last.is_empty() { what } else { format!("{what}: {last}") };
        Err(CudaError::Call { call, reason })
    }
}

/// This rank's communicators.
pub struct Nccl {
    library: Library,
    /// Of all ranks, then of each team; empty after an abort.
    communicators: RefCell<Vec<ncclComm_t>>,
    timeout: Duration,
}

impl Nccl {
    /// Waits until NCCL has accepted a call, which is normally immediate.
    fn settle(
        &self,
        call: &'static str,
        code: u32,
        communicator: ncclComm_t,
        failure: impl Fn() -> Option<String>,
    ) -> Result {
        let (mut code, started) = (code, Instant::now());
        while code == IN_PROGRESS {
            let reason = failure().or_else(|| {
                let seconds = self.timeout.as_secs_f64();
                let late = started.elapsed() > self.timeout;
                late.then(|| format!("not all ranks connected within {seconds} s"))
            });
            if let Some(reason) = reason {
                return Err(CudaError::Call { call, reason });
            }
            std::thread::sleep(Duration::from_micros(100));
            code = self.state(communicator);
        }
        self.library.check(call, code, communicator)
    }

    /// The state of the calls so far.
    fn state(&self, communicator: ncclComm_t) -> u32 {
        let mut state = 0;
        // SAFETY: the communicator is alive; the pointer is valid.
        match unsafe { (self.library.api.ncclCommGetAsyncError)(communicator, &mut state) } {
            0 => state,
            code => code,
        }
    }

    /// An error of another rank or of the network, if one was detected.
    pub(super) fn asynchronous_error(&self) -> Option<String> {
        let communicators = self.communicators.borrow();
        let error = |communicator: &ncclComm_t| match self.state(*communicator) {
            IN_PROGRESS => None,
            state => self.library.check("NCCL", state, *communicator).err().map(|e| e.to_string()),
        };
        communicators.iter().find_map(error)
    }

    /// Aborts all collectives; none can follow. Beside it `destroy_graphs` destroys what was captured: the library waits until no
    /// graph holds its collectives, and the driver until a graph has ended, which one that waits for a lost rank does only
    /// once it is aborted. Each is done by a thread of its own, which calls `enter` first.
    pub(super) fn abort(
        &self,
        enter: impl Fn() + Copy + Send + 'static,
        destroy_graphs: impl FnOnce() + Send + 'static,
    ) {
        skip_exit_handlers();
        let begin = |work: Box<dyn FnOnce() + Send>| {
            std::thread::spawn(move || {
                enter();
                work();
            })
        };
        // All at once: one communicator may wait until the GPU has ended the collectives of another.
        let mut threads = vec![begin(Box::new(destroy_graphs))];
        let abort = self.library.api.ncclCommAbort;
        for communicator in self.communicators.take() {
            // That of all ranks is null where it was refused.
            if !communicator.is_null() {
                let communicator = communicator as usize;
                // SAFETY: the communicator was alive, and is not used again. Its result is irrelevant.
                let work = move || _ = unsafe { abort(communicator as ncclComm_t) };
                threads.push(begin(Box::new(work)));
            }
        }
        let end = Instant::now() + ABORT;
        for thread in threads {
            while !thread.is_finished() && Instant::now() < end {
                std::thread::sleep(Duration::from_millis(1));
            }
            if thread.is_finished() {
                let _ = thread.join();
            } else {
                // The library waits for a rank that is lost; it may go on while the process ends.
                std::mem::forget(thread);
            }
        }
    }

    fn communicator(&self, call: &'static str, team: TeamHandle) -> Result<ncclComm_t> {
        let stopped = || CudaError::Call { call, reason: "the ranks were told to stop".into() };
        self.communicators.borrow().get(team.0).copied().ok_or_else(stopped)
    }

    /// Creates the communicator of a team; every rank must create its own of the same shape.
    ///
    /// # Errors
    /// If NCCL refuses.
    pub(super) fn create_team(&self, team: Team) -> Result<TeamHandle> {
        const CALL: &str = "ncclCommSplit";
        let all = self.communicator(CALL, TeamHandle::default())?;
        let mut made: ncclComm_t = null_mut();
        let (to, color) = (&raw mut made, team.first as c_int);
        // Teams of one shape differ by their first rank. Equal keys keep the order of ranks, and without a
        // configuration the new communicator does not block either.
        // SAFETY: the communicator is alive; the pointer is valid until the call has settled.
        let code = unsafe { (self.library.api.ncclCommSplit)(all, color, 0, to, null_mut()) };
        let settled = self.settle(CALL, code, all, || None);
        let settled = settled.and_then(|()| self.settle(CALL, self.state(made), made, || None));
        // Nothing is captured yet.
        settled.inspect_err(|_| self.abort(|| (), || ()))?;
        let mut communicators = self.communicators.borrow_mut();
        communicators.push(made);
        Ok(TeamHandle(communicators.len() - 1))
    }

    /// Enqueues a collective with the other members of a team.
    ///
    /// # Errors
    /// If NCCL refuses.
    pub(super) fn collective(&self, collective: &Collective, on: StreamHandle) -> Result {
        let Collective { exchange, team, send, recv, count, dtype } = *collective;
        let call = match exchange {
            Exchange::AllGather => "ncclAllGather",
            Exchange::ReduceScatter(_) => "ncclReduceScatter",
            Exchange::AllReduce(_) => "ncclAllReduce",
            Exchange::AllToAll(_) => "ncclSend",
        };
        let (api, communicator) = (&self.library.api, self.communicator(call, team)?);
        let bytes = count * dtype.size();
        let (send, recv) = (send as *const c_void, recv as *mut c_void);
        let (dtype, on) = (data_type(dtype)?, stream(on));
        // SAFETY: the communicator is alive; the addresses are those of the plan.
        let code = unsafe {
            match exchange {
                Exchange::AllGather => {
                    (api.ncclAllGather)(send, recv, count, dtype, communicator, on)
                }
                Exchange::ReduceScatter(how) => {
                    let how = operation(how);
                    (api.ncclReduceScatter)(send, recv, count, dtype, how, communicator, on)
                }
                Exchange::AllReduce(how) => {
                    let how = operation(how);
                    (api.ncclAllReduce)(send, recv, count, dtype, how, communicator, on)
                }
                Exchange::AllToAll(ranks) => {
                    // A group is closed whatever became of what is in it.
                    let opened = (api.ncclGroupStart)();
                    let enqueue = |rank: usize| {
                        let (from, to) = (send.byte_add(rank * bytes), recv.byte_add(rank * bytes));
                        let peer = rank as c_int;
                        match (api.ncclSend)(from, count, dtype, peer, communicator, on) {
                            0 | IN_PROGRESS => {
                                (api.ncclRecv)(to, count, dtype, peer, communicator, on)
                            }
                            code => code,
                        }
                    };
                    let codes = (0..ranks).map(enqueue);
                    let failed = codes.fold(opened, |code, next| match code {
                        0 | IN_PROGRESS => next,
                        failed => failed,
                    });
                    match (failed, (api.ncclGroupEnd)()) {
                        (0 | IN_PROGRESS, closed) => closed,
                        (failed, _) => failed,
                    }
                }
            }
        };
        self.settle(call, code, communicator, || None)
    }
}

/// The mean is NCCL's, which multiplies each rank's part by 1/N before the sum; for N a power of two that equals
/// dividing the sum by N.
fn operation(reduce: ReduceKind) -> ncclRedOp_t {
    match reduce {
        ReduceKind::Sum => ncclRedOp_t::ncclSum,
        ReduceKind::Mean => ncclRedOp_t::ncclAvg,
        ReduceKind::Max => ncclRedOp_t::ncclMax,
    }
}

fn data_type(dtype: DType) -> Result<ncclDataType_t> {
    Ok(match dtype {
        DType::F64 => ncclDataType_t::ncclFloat64,
        DType::F32 => ncclDataType_t::ncclFloat32,
        DType::F16 => ncclDataType_t::ncclFloat16,
        DType::BF16 => ncclDataType_t::ncclBfloat16,
        DType::I64 => ncclDataType_t::ncclInt64,
        DType::I32 => ncclDataType_t::ncclInt32,
        DType::U8 | DType::Bool => ncclDataType_t::ncclUint8,
        other => {
            return Err(CudaError::Call { call: "NCCL", reason: format!("no {other}") });
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_library_has_every_function() {
        match Library::open() {
            Ok(library) => assert!(library.version >= (2, 18, 0)),
            Err(e @ LibraryError::Missing { .. }) => eprintln!("SKIPPED: {e}"),
            Err(e) => panic!("{e}"),
        }
    }
}
