//! How generated kernels are called, and the symbols that bind this to what they compute.

use super::{Kernel, sha256_hex};
use serde::{Deserialize, Serialize};

/// How to call a generated kernel.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Entry {
    /// `fn(reads…, writes…, begin: i64, end: i64)` of a shared object.
    Host {
        /// Symbol in the object file; see [`Entry::symbol`].
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
}

/// One launch of a kernel of a PTX module.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CudaLaunch {
    /// Symbol in the object file; see [`Entry::symbol`].
    pub symbol: String,
    /// Blocks in x and y.
    pub grid: [u32; 2],
    /// Threads per block, in x.
    pub block: u32,
    /// Whether fewer blocks in x compute the same bits: the blocks take turns at the work. There are never more of
    /// them than the GPU runs in a few rounds.
    pub grid_stride: bool,
}

/// Digits of a symbol's digest.
const DIGITS: usize = 16;

impl Kernel {
    /// Takes hash and symbols from the body and from how it is called.
    pub fn bind(&mut self) {
        self.hash = sha256_hex(self.body.to_string().as_bytes());
        let Some(entry) = &mut self.entry else { return };
        let bound = entry.symbol(&self.name, &self.hash);
        for symbol in entry.symbols_mut() {
            *symbol = format!("{bound}{}", suffix(symbol, &self.name).unwrap_or(symbol));
        }
    }
}

impl Entry {
    /// The symbol of a kernel of this name, whose body has this hash and which is called like this, symbols
    /// aside: `NAME_DIGEST`. Code generation gives it to the code that it makes of the body, so that an entry
    /// that was changed names code that is not in the object file.
    pub fn symbol(&self, name: &str, hash: &str) -> String {
        let mut called = self.clone();
        for symbol in called.symbols_mut() {
            *symbol = suffix(symbol, name).unwrap_or(symbol).to_string();
        }
        let called = serde_json::to_string(&called).expect("invariant: an entry serializes");
        let digest = sha256_hex(format!("{hash} {called}").as_bytes());
        format!("{name}_{}", &digest[..DIGITS])
    }

    /// Whether its symbols are those of a kernel of this name and body that is called so.
    pub(super) fn is_bound(&self, name: &str, hash: &str) -> bool {
        let symbol = self.symbol(name, hash);
        self.symbols().iter().all(|s| s.starts_with(&symbol))
    }

    /// Names in the object file.
    pub fn symbols(&self) -> Vec<&str> {
        match self {
            Entry::Host { symbol, .. } => vec![symbol],
            Entry::Cuda { launches, .. } => launches.iter().map(|l| l.symbol.as_str()).collect(),
        }
    }

    fn symbols_mut(&mut self) -> Vec<&mut String> {
        match self {
            Entry::Host { symbol, .. } => vec![symbol],
            Entry::Cuda { launches, .. } => launches.iter_mut().map(|l| &mut l.symbol).collect(),
        }
    }
}

/// What a launch adds to the symbol of a kernel of this name.
fn suffix<'a>(symbol: &'a str, name: &str) -> Option<&'a str> {
    symbol.strip_prefix(name)?.strip_prefix('_')?.get(DIGITS..)
}
