//! Cases of every operation that has a lemma.

mod index;
mod layout;
mod network;
mod pointwise;
mod reduce;

use super::draw::{Case, Draw, Kind};
use frit_ir::DType;

/// Cases in each element type, most in f64; some operands of some are not trained.
pub(crate) fn cases(seed: u64) -> Vec<Case> {
    let mut all = Vec::new();
    for (i, dtype) in
        [DType::F64, DType::F64, DType::F64, DType::F32, DType::BF16].iter().enumerate()
    {
        let draw = &mut Draw::new(1000 * seed + i as u64);
        draw.dtype = *dtype;
        for family in [pointwise::cases, layout::cases, index::cases, reduce::cases, network::cases]
        {
            all.extend(family(draw));
        }
        for case in &mut all {
            let trained: Vec<usize> =
                (0..case.operands.len()).filter(|j| case.operands[*j].1 == Kind::Trained).collect();
            if trained.len() > 1 && draw.size(0..=9) == 0 {
                case.operands[draw.one_of(&trained)].1 = Kind::Given;
            }
        }
    }
    all
}
