//! A long row in a block's shared memory: what the first loop over its columns reads, later loops need not read again.
//!
//! Every thread reads back the columns that it wrote itself, so that no barrier is needed.

use super::expr::{Expr, Id};
use super::load_store;
use super::point::Emitter;
use super::region::{Program, Store, levels};
use super::row_reduce::{loop_roots, reachable};
use super::text::{Elem, Type, Val};
use frit_ir::DType;
use std::collections::{HashMap, HashSet};
use std::fmt::Write;

/// Maximum bytes of a block: two of the largest fit on a multiprocessor of data center GPUs since compute capability 9.0, and one
/// on every GPU since 8.0, beside the partial results of warps.
/// Source: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
const MAX_BYTES: usize = (99 << 10) - 512;

/// The operands of which a block keeps one row.
pub(crate) struct KeptRow {
    memref: Val,
    dtype: DType,
    loads: HashMap<Id, Place>,
}

#[derive(Clone, Copy)]
struct Place {
    /// Elements before it.
    first: usize,
    /// Whether a loop has written it.
    filled: bool,
}

impl KeptRow {
    /// Declares shared memory for what several loops over the columns read, as far as it fits. Its bytes are dynamic:
    /// more than 48 KiB cannot be static.
    pub(crate) fn declare(e: &mut Emitter<'_>, symbol: &str, globals: &mut String) {
        let program = e.program;
        let Some((dtype, mut loads)) = read_again(program) else { return };
        loads.truncate(MAX_BYTES / (program.cols() * dtype.size()));
        if loads.is_empty() {
            return;
        }
        let elem = load_store::in_memory(dtype, e.memory);
        let ty = memref_type(elem);
        writeln!(globals, "memref.global @{symbol}_row : {ty} {{alignment = 16}}")
            .expect("invariant: a String takes all text");
        let get = format!("memref.get_global @{symbol}_row : {ty}");
        let memref = e.t.def(Type(elem, 1), format_args!("{get}"));
        let place = |i: usize| Place { first: i * program.cols(), filled: false };
        e.shared_bytes = loads.len() * program.cols() * dtype.size();
        let loads = loads.into_iter().enumerate().map(|(i, id)| (id, place(i))).collect();
        e.kept_row = Some(KeptRow { memref, dtype, loads });
    }
}

/// Marks what a loop over the columns has read.
pub(crate) fn fill(e: &mut Emitter<'_>, roots: &[Id]) {
    let program = e.program;
    let Some(row) = &mut e.kept_row else { return };
    for id in reachable(program, roots) {
        if let Some(place) = row.loads.get_mut(&id) {
            place.filled = true;
        }
    }
}

/// The elements of a load at the current columns: read back if they are kept; otherwise read by `read`, and kept if they are
/// to be.
pub(crate) fn load(e: &mut Emitter<'_>, id: Id, read: impl FnOnce(&mut Emitter<'_>) -> Val) -> Val {
    let (Some((col, _)), Some(row)) = (e.col, &e.kept_row) else { return read(e) };
    let Some(&place) = row.loads.get(&id) else { return read(e) };
    let (memref, elem) = (row.memref, load_store::in_memory(row.dtype, e.memory));
    let (ty, of) = (memref_type(elem), Type(elem, e.width));
    let alignment = load_store::alignment(e.memory, row.dtype, e.width);
    let first = e.t.index(place.first);
    let at = e.t.same("arith.addi", &[col, first]);
    if place.filled {
        return match e.width {
            1 => e.t.def(of, format_args!("memref.load {memref}[{at}] : {ty}")),
            _ => e.t.def(of, format_args!("vector.load {memref}[{at}]{alignment} : {ty}, {of}")),
        };
    }
    let raw = read(e);
    match e.width {
        1 => e.t.line(format_args!("memref.store {raw}, {memref}[{at}] : {ty}")),
        _ => e.t.line(format_args!("vector.store {raw}, {memref}[{at}]{alignment} : {ty}, {of}")),
    }
    raw
}

/// What several loops over the columns read of a row, of the dtype of the first; in order.
fn read_again(program: &Program) -> Option<(DType, Vec<Id>)> {
    let levels = levels(program);
    let of_columns = |s: &&Store| s.at.strides.last() != Some(&0);
    let stores: Vec<Store> = program.stores.iter().filter(of_columns).cloned().collect();
    let loops: Vec<HashSet<Id>> = loop_roots(program, &levels, &stores)
        .iter()
        .map(|roots| reachable(program, roots))
        .collect();
    let mut found: Option<(DType, Vec<Id>)> = None;
    for id in program.dag.ids() {
        let Expr::Load { operand, at } = program.dag.get(id) else { continue };
        let times = loops.iter().filter(|read| read.contains(&id)).count();
        if times > 1 && program.depends(id).row && at.strides.last() == Some(&1) {
            let dtype = program.types[*operand].dtype;
            let (of, loads) = found.get_or_insert((dtype, Vec::new()));
            if *of == dtype {
                loads.push(id);
            }
        }
    }
    found
}

/// Dynamic shared memory, whose length the launch says.
fn memref_type(elem: Elem) -> String {
    format!("memref<0x{}, 3>", elem.name())
}
