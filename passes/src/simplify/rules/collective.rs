//! Rules for collectives: operations move before a gather, where they work on a shard, if that reduces traffic.
//!
//! A gather keeps its region: forward and backward gathers of one parameter are separate on purpose. Reductions commute with no cast,
//! since the sum would be rounded elsewhere.

use super::{Expr, Match, Rule};
use crate::rule::Statement;
use frit_ir::ops::Op;

/// The rule that makes gathers narrower.
pub(in crate::simplify) const CAST_BEFORE_GATHER: &str = "cast-before-gather";

/// Rules about collectives.
pub(super) const RULES: &[Rule] = &[
    Rule {
        statement: Statement::bits(
            CAST_BEFORE_GATHER,
            "cast(all_gather [r](x)) = all_gather [r](cast [r](x))",
            &[r#"cast{to="bf16"}(all_gather{unit=0}($w:f32[a,b]))"#],
        ),
        topic: "collective",
        apply: before_gather,
    },
    Rule {
        statement: Statement::bits(
            "cast-after-gather",
            "all_gather [r](cast(x)) = cast [r](all_gather [r](x))",
            &[r#"all_gather{unit=0}(cast{to="bf16"}($w:f32[a,b]))"#],
        ),
        topic: "collective",
        apply: after_gather,
    },
];

/// Only one cast, to floats, of what a group holds: a group is cast as a whole, from the dtype that it is held in.
fn before_gather(m: &Match<'_>) -> Option<Expr> {
    let Op::Cast(cast) = m.op else { return None };
    m.operand(0).find_map(|(op, region, inputs)| match op {
        Op::AllGather(_) if cast.to.is_float() && m.is_leaf(inputs[0]) => {
            let inside = Expr::one(m.op.clone(), region, Expr::Class(inputs[0]));
            Some(Expr::one(op.clone(), region, inside))
        }
        _ => None,
    })
}

fn after_gather(m: &Match<'_>) -> Option<Expr> {
    let Op::AllGather(_) = m.op else { return None };
    m.operand(0).find_map(|(op, _, inputs)| match op {
        Op::Cast(_) => Some(Expr::one(op.clone(), m.region, m.make(m.op.clone(), inputs))),
        _ => None,
    })
}
