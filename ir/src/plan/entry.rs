//! Kernel entries: how a kernel is executed, and the digest that binds the entry to the kernel's body.

use super::{Kernel, KernelKind, Launches, Routine, sha256_hex};
use crate::Graph;
use serde::{Deserialize, Serialize};

/// How a kernel is executed; selected by the compiler, once for each body.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Entry {
    /// `fn(operands: *const *mut u8, begin: i64, end: i64)` of a shared object, where `operands` are the addresses of
    /// what the task reads and writes.
    Host {
        /// Symbol in the object file; see [`Kernel::symbol`].
        symbol: String,
        /// The parallel range is `0..extent`.
        extent: usize,
        /// Parts of the range begin at multiples of this.
        grain: usize,
    },
    /// Kernels of a PTX module, launched one after the other, each as
    /// `(reads…, writes…)` and, if there is scratch memory, a pointer to it.
    Cuda {
        /// The launches, in order.
        launches: Vec<CudaLaunch>,
        /// Device memory that the launches share among themselves, in bytes; its content is lost
        /// between tasks.
        scratch_bytes: usize,
    },
    /// A routine of the CPU's kernel library.
    Routine(Routine),
    /// Launches of hand-written kernels and of libraries on a GPU.
    Launches(Launches),
    /// The IR interpreter, on a CPU.
    Interpreter,
}

/// One launch of a kernel of a PTX module.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CudaLaunch {
    /// Symbol in the object file; see [`Kernel::symbol`].
    pub symbol: String,
    /// Blocks in x and y.
    pub grid: [u32; 2],
    /// Threads per block, in x.
    pub block: u32,
    /// Dynamic shared memory per block, in bytes; above 48 KiB a kernel must be allowed to have it.
    #[serde(default, skip_serializing_if = "super::launch::is_zero")]
    pub shared_bytes: u32,
    /// Whether fewer blocks in x compute the same bits: the blocks take turns at the work. There are never more of
    /// them than the GPU runs in a few rounds.
    pub grid_stride: bool,
}

/// Digits of a symbol's digest.
const DIGITS: usize = 16;

impl Kernel {
    /// A kernel with this entry, whose symbols are derived from the kernel's name.
    pub fn new(name: String, body: Graph, mut entry: Entry) -> Kernel {
        for symbol in entry.symbols_mut() {
            *symbol = format!("{name}_{:0>DIGITS$}{symbol}", "");
        }
        let (hash, entry_hash) = (String::new(), String::new());
        let mut kernel = Kernel { name, body, hash, entry_hash, entry };
        kernel.bind();
        kernel
    }

    /// How it is executed, in a word.
    pub fn kind(&self) -> KernelKind {
        match self.entry {
            Entry::Host { .. } | Entry::Cuda { .. } => KernelKind::Generated,
            Entry::Routine(_) | Entry::Launches(_) => KernelKind::Library,
            Entry::Interpreter => KernelKind::Interpreted,
        }
    }

    /// The prefix of its symbols: `NAME_DIGEST`. Code generation gives it to the code that it makes of the body, so
    /// that an entry that was changed names code that is not in the object file.
    pub fn symbol(&self) -> String {
        let digest = self.entry_hash.get(..DIGITS).unwrap_or_default();
        format!("{}_{digest}", self.name)
    }

    /// Takes hashes and symbols from the body and from how it is executed.
    pub fn bind(&mut self) {
        self.hash = sha256_hex(self.body.to_string().as_bytes());
        self.entry_hash = self.entry.hash(&self.name, &self.hash);
        let (bound, name) = (self.symbol(), self.name.clone());
        for symbol in self.entry.symbols_mut() {
            *symbol = format!("{bound}{}", suffix(symbol, &name).unwrap_or(symbol));
        }
    }

    /// Whether its hash and symbols are those of its body and of how it is executed.
    pub(super) fn is_bound(&self) -> bool {
        let symbol = self.symbol();
        self.entry_hash == self.entry.hash(&self.name, &self.hash)
            && self.entry.symbols().iter().all(|s| s.starts_with(&symbol))
    }
}

impl Entry {
    /// SHA-256 of how a kernel of this name, whose body has this hash, is executed, but for the digests of its symbols.
    fn hash(&self, name: &str, hash: &str) -> String {
        let mut called = self.clone();
        for symbol in called.symbols_mut() {
            *symbol = suffix(symbol, name).unwrap_or(symbol).to_string();
        }
        let called = serde_json::to_string(&called).expect("invariant: an entry serializes");
        sha256_hex(format!("{hash} {called}").as_bytes())
    }

    /// Names in the object file.
    pub fn symbols(&self) -> Vec<&str> {
        match self {
            Entry::Host { symbol, .. } => vec![symbol],
            Entry::Cuda { launches, .. } => launches.iter().map(|l| l.symbol.as_str()).collect(),
            _ => vec![],
        }
    }

    fn symbols_mut(&mut self) -> Vec<&mut String> {
        match self {
            Entry::Host { symbol, .. } => vec![symbol],
            Entry::Cuda { launches, .. } => launches.iter_mut().map(|l| &mut l.symbol).collect(),
            _ => vec![],
        }
    }

    /// Device memory that its launches share among themselves, whichever candidates run, in bytes.
    pub fn scratch_bytes(&self) -> usize {
        match self {
            Entry::Cuda { scratch_bytes, .. } => *scratch_bytes,
            Entry::Launches(selected) => selected.most_scratch_bytes(),
            _ => 0,
        }
    }
}

/// The suffix that a launch adds to the symbol of a kernel of this name.
fn suffix<'a>(symbol: &'a str, name: &str) -> Option<&'a str> {
    symbol.strip_prefix(name)?.strip_prefix('_')?.get(DIGITS..)
}
