//! The rules, as data. Each has a topic and states what stays equal.
//!
//! A rule looks at one term of a class and says which other terms have the same value. In the
//! descriptions `f [r]` is the operation `f` in region `r`; where no region is named, a rule fires only if
//! all operations that it moves are of one region.

mod cast;
mod collective;
mod layout;

pub(super) use collective::CAST_BEFORE_GATHER;

use super::language::{EGraph, OpId, Term};
use crate::rule::Statement;
use egg::Id;
use frit_ir::ops::Op;
use frit_ir::{Region, TensorType};

/// A rewrite rule.
#[derive(Clone, Copy)]
pub struct Rule {
    /// What it states. A rule that claims nothing is applied only if asked for.
    pub statement: Statement,
    /// The file that contains it.
    pub topic: &'static str,
    apply: fn(&Match<'_>) -> Option<Expr>,
}

impl std::fmt::Debug for Rule {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?}", self.statement)
    }
}

/// Every rule, by topic.
pub fn all() -> Vec<Rule> {
    [cast::RULES, layout::RULES, collective::RULES].concat()
}

impl Rule {
    /// The rule's matches for this term of the class, checked to have the class's type.
    pub(super) fn find(&self, egraph: &EGraph, class: Id, term: &Term) -> Option<Expr> {
        let Term::Node(op, region, inputs) = term else { return None };
        let matched = Match { egraph, op: egraph.analysis.op(*op), region: *region, inputs };
        let found = (self.apply)(&matched)?;
        let data = &egraph[class].data;
        let (ty, sharded) = found.ty(egraph)?;
        (ty == data.ty && sharded == data.sharded).then_some(found)
    }
}

/// A new term.
#[derive(Clone, Debug)]
pub(super) enum Expr {
    /// A class that is there.
    Class(Id),
    /// An operation on new terms.
    Make(Op, Region, Vec<Expr>),
}

impl Expr {
    fn one(op: Op, region: Region, input: Expr) -> Self {
        Expr::Make(op, region, vec![input])
    }

    /// Type and sharding; `None` if an operation does not fit its operands.
    fn ty(&self, egraph: &EGraph) -> Option<(TensorType, bool)> {
        match self {
            Expr::Class(id) => Some((egraph[*id].data.ty.clone(), egraph[*id].data.sharded)),
            Expr::Make(op, _, inputs) => {
                let inputs: Vec<(TensorType, bool)> =
                    inputs.iter().map(|e| e.ty(egraph)).collect::<Option<_>>()?;
                let types: Vec<&TensorType> = inputs.iter().map(|(ty, _)| ty).collect();
                let sharded = inputs.iter().any(|i| i.1) && !matches!(op, Op::AllGather(_));
                Some((op.infer(&types).ok()?.into_iter().next()?, sharded))
            }
        }
    }

    pub(super) fn add(&self, egraph: &mut EGraph) -> Id {
        match self {
            Expr::Class(id) => *id,
            Expr::Make(op, region, inputs) => {
                let inputs = inputs.iter().map(|e| e.add(egraph)).collect();
                let op: OpId = egraph.analysis.intern(op);
                egraph.add(Term::Node(op, *region, inputs))
            }
        }
    }
}

/// A term that a rule looks at.
pub(super) struct Match<'a> {
    egraph: &'a EGraph,
    op: &'a Op,
    region: Region,
    inputs: &'a [Id],
}

impl<'a> Match<'a> {
    fn ty(&self, class: Id) -> &'a TensorType {
        &self.egraph[class].data.ty
    }

    /// Whether a class has a value from outside of the window.
    fn is_leaf(&self, class: Id) -> bool {
        self.egraph[class].nodes.iter().any(|term| matches!(term, Term::Leaf(_)))
    }

    /// The terms of operand `i` that are operations, with their regions and operands.
    fn operand(&self, i: usize) -> impl Iterator<Item = (&'a Op, Region, &'a [Id])> + use<'a> {
        let egraph = self.egraph;
        let class = self.inputs.get(i).map(|c| &egraph[*c]);
        class.into_iter().flat_map(|c| &c.nodes).filter_map(|term| match term {
            Term::Node(op, region, inputs) => {
                Some((egraph.analysis.op(*op), *region, inputs.as_slice()))
            }
            Term::Leaf(_) => None,
        })
    }

    /// The first of those terms that is of the same region and of which `pick` makes something.
    fn inner<T>(&self, i: usize, pick: impl Fn(&'a Op, &'a [Id]) -> Option<T>) -> Option<T> {
        self.operand(i)
            .filter(|(_, region, _)| *region == self.region)
            .find_map(|(op, _, inputs)| pick(op, inputs))
    }

    fn make(&self, op: Op, inputs: &[Id]) -> Expr {
        Expr::Make(op, self.region, inputs.iter().map(|i| Expr::Class(*i)).collect())
    }
}
