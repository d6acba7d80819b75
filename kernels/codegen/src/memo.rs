//! Code that was generated before in this process: the plans of a training, of its evaluation and of the same model compiled otherwise
//! have many bodies in common.
//!
//! Code is kept under a symbol that stands for any, and is given that of a plan's kernel afterwards.

use crate::error::CodegenError;
use crate::llvm::Target;
use frit_ir::plan::sha256_hex;
use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

/// The bytes of the symbol that stands for any. Those of plans are shorter.
const BYTES: usize = 255;

/// The symbol that stands for any.
pub(crate) fn any_symbol() -> String {
    format!("frit_{}", "_".repeat(BYTES - "frit_".len()))
}

/// Code by the digest of its source and target.
pub(crate) struct Memo(Mutex<BTreeMap<String, Vec<u8>>>);

impl Memo {
    pub(crate) const fn new() -> Self {
        Memo(Mutex::new(BTreeMap::new()))
    }

    /// The code of a source that was compiled before, or is now.
    pub(crate) fn code(
        &self,
        source: &str,
        target: &Target,
        compile: impl FnOnce() -> Result<Vec<u8>, CodegenError>,
    ) -> Result<Vec<u8>, CodegenError> {
        let known = || self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let key = sha256_hex(format!("{target:?}\n{source}").as_bytes());
        if let Some(code) = known().get(&key) {
            return Ok(code.clone());
        }
        let code = compile()?;
        known().insert(key, code.clone());
        Ok(code)
    }
}

/// Object code with a symbol in place of the one that stands for any: names in it end with a 0, so a shorter one fits.
pub(crate) fn named(mut object: Vec<u8>, symbol: &str) -> Vec<u8> {
    let any = any_symbol();
    let place = object.windows(BYTES).position(|bytes| bytes == any.as_bytes());
    let place = place.expect("invariant: code has the symbol that it was compiled with");
    assert!(symbol.len() < BYTES, "invariant: symbols of kernels are short: {symbol}");
    let name = symbol.bytes().chain(std::iter::repeat(0));
    object[place..place + BYTES].iter_mut().zip(name).for_each(|(byte, new)| *byte = new);
    object
}
