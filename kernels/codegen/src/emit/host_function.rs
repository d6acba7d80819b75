//! The frame of a host kernel: its signature and the range of units it is called for.

use super::load_store::Memory;
use super::point::Emitter;
use super::region::Program;
use super::text::Val;
use super::{col_reduce, pointwise, row_reduce};
use frit_ir::ops::FusionKind;

/// Lanes of a vector on the host; targets with narrower registers split it.
pub(crate) const LANES: usize = 16;

/// The function `symbol`, callable as `extern "C" fn(operands: *const *mut u8, begin: i64, end: i64)`, where `operands` are
/// the addresses of operands and results.
pub(crate) fn emit(program: &Program, symbol: &str, converts_bf16: bool) -> String {
    let memory = Memory { converts_bf16, alignment: None, has_exp2: false };
    let mut e = Emitter::new(program, LANES, memory);
    let begin = argument(&mut e, "begin");
    let end = argument(&mut e, "end");
    // What depends on neither row nor column, such as a bias correction, is computed once per call.
    e.prepare_uniform(|_| true);
    match program.kind {
        FusionKind::RowReduce => row_reduce::emit(&mut e, begin, end),
        FusionKind::ColReduce => col_reduce::emit(&mut e, begin, end),
        _ => pointwise::emit(&mut e, begin, end),
    }
    let operands: String =
        (0..program.types.len()).map(|i| operand(i, &e.buffer(i).ty(memory))).collect();
    format!(
        "func.func @{symbol}(%operands: !llvm.ptr, %begin: i64, %end: i64) {{\n{operands}{}return\n}}\n",
        e.t.finish()
    )
}

/// Loads the address of operand `i` into the descriptor of a memref of one dimension. With a static shape no other
/// field of the descriptor is read.
fn operand(i: usize, memref: &str) -> String {
    let descriptor = "!llvm.struct<(ptr, ptr, i64, array<1 x i64>, array<1 x i64>)>";
    format!(
        "%slot{i} = llvm.getelementptr %operands[{i}] : (!llvm.ptr) -> !llvm.ptr, !llvm.ptr\n\
         %address{i} = llvm.load %slot{i} : !llvm.ptr -> !llvm.ptr\n\
         %empty{i} = llvm.mlir.poison : {descriptor}\n\
         %allocated{i} = llvm.insertvalue %address{i}, %empty{i}[0] : {descriptor}\n\
         %aligned{i} = llvm.insertvalue %address{i}, %allocated{i}[1] : {descriptor}\n\
         %arg{i} = builtin.unrealized_conversion_cast %aligned{i} : {descriptor} to {memref}\n"
    )
}

fn argument(e: &mut Emitter<'_>, name: &str) -> Val {
    let ty = super::text::Type(super::text::Elem::Index, 1);
    e.t.def(ty, format_args!("arith.index_cast %{name} : i64 to index"))
}
