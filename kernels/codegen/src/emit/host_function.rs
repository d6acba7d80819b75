//! The frame of a host kernel: its signature and the range of units it is called for.

use super::load_store::Memory;
use super::point::Emitter;
use super::region::Program;
use super::text::Val;
use super::{col_reduce, pointwise, row_reduce};
use frit_ir::ops::FusionKind;

/// Lanes of a vector on the host; targets with narrower registers split it.
pub(crate) const LANES: usize = 16;

/// The function `symbol`, callable as `extern "C" fn(operand…, result…, begin: i64, end: i64)`.
pub(crate) fn emit(program: &Program, symbol: &str, converts_bf16: bool) -> String {
    let memory = Memory { converts_bf16, alignment: None };
    let mut e = Emitter::new(program, LANES, memory);
    let begin = argument(&mut e, "begin");
    let end = argument(&mut e, "end");
    // What depends on neither row nor column, such as a bias correction, is computed once per call.
    e.prepare_uniform();
    match program.kind {
        FusionKind::RowReduce => row_reduce::emit(&mut e, begin, end),
        FusionKind::ColReduce => col_reduce::emit(&mut e, begin, end),
        _ => pointwise::emit(&mut e, begin, end),
    }
    let mut arguments: Vec<String> =
        (0..program.types.len()).map(|i| format!("%arg{i}: {}", e.buffer(i).ty())).collect();
    arguments.extend(["%begin: i64".into(), "%end: i64".into()]);
    let arguments = arguments.join(", ");
    format!("func.func @{symbol}({arguments}) {{\n{}return\n}}\n", e.t.finish())
}

fn argument(e: &mut Emitter<'_>, name: &str) -> Val {
    let ty = super::text::Type(super::text::Elem::Index, 1);
    e.t.def(ty, format_args!("arith.index_cast %{name} : i64 to index"))
}
