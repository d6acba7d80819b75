//! Rounding to narrow dtypes.

use crate::term::{Function, Number, Term, TermId, Terms};
use frit_ir::ops::UnaryFn;
use frit_ir::{DType, Op};

/// Whether the results of an operation are elements of its operands, up to their signs: there is nothing to round.
pub(crate) fn is_exact(op: &Op) -> bool {
    let moves = matches!(
        op,
        Op::Embedding(_)
            | Op::Gather(_)
            | Op::GatherNd(_)
            | Op::GatherElements(_)
            | Op::Select
            | Op::AllGather(_)
            | Op::CustomGradient(_)
            | Op::EnterPrecision(_)
            | Op::LeavePrecision(_)
            | Op::Unary(UnaryFn::Neg | UnaryFn::Detach | UnaryFn::Relu)
    );
    moves || op.is_layout() || op.is_leaf()
}

/// The term, rounded. Signs, powers of two and truth values are factors of the rounded number; numbers that are constants of the graph
/// are taken to be representable.
pub(crate) fn rounded(t: &mut Terms, term: TermId, dtype: DType) -> TermId {
    if !dtype.is_low_precision() {
        return term;
    }
    let term = t.polynomial(term);
    match t.get(term).clone() {
        Term::Number(_) | Term::Index(_) | Term::NotNegative(_) => return term,
        Term::Apply(f, _) if f.name == ROUND && f.attributes[0] == dtype as u64 => return term,
        Term::Product(factors) => {
            let (truths, rest): (Vec<_>, Vec<_>) =
                factors.iter().partition(|f| t.is_truth_factor(f));
            // Where one is a sum, all stays: each of its parts would be summed for itself.
            let is_sum = |(x, _): &(TermId, Number)| matches!(t.get(*x), Term::Sum(..));
            if !truths.is_empty() && !truths.iter().any(is_sum) {
                let values = |of: Vec<(TermId, Number)>| -> Vec<(TermId, f64)> {
                    of.into_iter().map(|(t, e)| (t, e.value())).collect()
                };
                let (mut factors, rest) = (values(truths), values(rest));
                let rest = t.product(&rest);
                factors.push((rounded(t, rest, dtype), 1.0));
                return t.product(&factors);
            }
        }
        _ if t.is_truth(term) => return term,
        _ => {}
    }
    let (content, _) = t.content(term);
    let factor = content.signum() * content.abs().log2().floor().exp2();
    if factor != 1.0 && factor.is_normal() {
        let rest = t.scale(term, 1.0 / factor);
        let rest = rounded(t, rest, dtype);
        return t.scale(rest, factor);
    }
    let function = Function { name: ROUND, attributes: [dtype as u64, 0] };
    t.function(function, &[term])
}

/// Rounding, and its dtype as an attribute of the function.
pub(crate) const ROUND: &str = "round";

/// The function [`ROUND`] of a term.
pub(crate) fn rounded_by(t: &mut Terms, term: TermId, attribute: u64) -> TermId {
    let dtype = DType::ALL.into_iter().find(|dtype| *dtype as u64 == attribute);
    rounded(t, term, dtype.expect("a dtype"))
}
