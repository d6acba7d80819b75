//! The e-graph: terms, and an analysis of every class.
//!
//! A term is an operation of the graph with one result and its region; both are part of its identity, so that equal nodes of different
//! regions stay distinct. Anything that rules cannot inspect is a leaf.

use egg::{DidMerge, Id, Language};
use frit_ir::ops::Op;
use frit_ir::{Region, TensorType};
use std::collections::HashMap;

/// An operation of [`Facts`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct OpId(u32);

/// A node of the e-graph.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Term {
    /// A value from outside of the window.
    Leaf(u32),
    /// An operation.
    Node(OpId, Region, Vec<Id>),
}

impl Language for Term {
    type Discriminant = Option<(OpId, Region)>;

    fn discriminant(&self) -> Self::Discriminant {
        match self {
            Term::Leaf(_) => None,
            Term::Node(op, region, _) => Some((*op, *region)),
        }
    }

    fn matches(&self, other: &Self) -> bool {
        match (self, other) {
            (Term::Leaf(a), Term::Leaf(b)) => a == b,
            (Term::Node(a, r, x), Term::Node(b, s, y)) => (a, r, x.len()) == (b, s, y.len()),
            _ => false,
        }
    }

    fn children(&self) -> &[Id] {
        match self {
            Term::Leaf(_) => &[],
            Term::Node(_, _, inputs) => inputs,
        }
    }

    fn children_mut(&mut self) -> &mut [Id] {
        match self {
            Term::Leaf(_) => &mut [],
            Term::Node(_, _, inputs) => inputs,
        }
    }
}

/// Facts about a value from outside of the window.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Leaf {
    pub(super) ty: TensorType,
    pub(super) sharded: bool,
    /// When it is available; see [`stage`].
    pub(super) stage: u8,
}

/// Facts about all terms of a class.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Data {
    pub(super) ty: TensorType,
    pub(super) sharded: bool,
    /// The earliest stage at which the value is available. A term of a later stage is never chosen for the class.
    pub(super) stage: u8,
    /// The node (by its number in the window) for which the class was created.
    pub(super) made_for: u32,
}

/// When nodes of a region run: they read only values of their stage and earlier ones.
pub(super) fn stage(region: Region) -> u8 {
    match region {
        Region::Forward => 0,
        Region::Recompute(_) | Region::Backward => 1,
        Region::Update => 2,
    }
}

/// The operations and leaves that terms name.
#[derive(Clone, Debug, Default)]
pub(super) struct Facts {
    ops: Vec<Op>,
    ids: HashMap<Op, OpId>,
    pub(super) leaves: Vec<Leaf>,
    /// The node whose classes are being created.
    pub(super) making_for: u32,
}

impl Facts {
    /// No operation yet, and these leaves.
    pub(super) fn new(leaves: Vec<Leaf>) -> Self {
        Facts { leaves, ..Facts::default() }
    }

    /// The number of an operation; equal operations have equal numbers.
    pub(super) fn intern(&mut self, op: &Op) -> OpId {
        if let Some(id) = self.ids.get(op) {
            return *id;
        }
        let id = OpId(self.ops.len() as u32);
        self.ids.insert(op.clone(), id);
        self.ops.push(op.clone());
        id
    }

    pub(super) fn op(&self, id: OpId) -> &Op {
        &self.ops[id.0 as usize]
    }
}

pub(super) type EGraph = egg::EGraph<Term, Facts>;

impl egg::Analysis<Term> for Facts {
    type Data = Data;

    fn make(egraph: &mut EGraph, term: &Term, _: Id) -> Data {
        let made_for = egraph.analysis.making_for;
        match term {
            Term::Leaf(i) => {
                let leaf = &egraph.analysis.leaves[*i as usize];
                let Leaf { ty, sharded, stage } = leaf.clone();
                Data { ty, sharded, stage, made_for }
            }
            Term::Node(op, region, inputs) => {
                let op = egraph.analysis.op(*op);
                let data: Vec<&Data> = inputs.iter().map(|i| &egraph[*i].data).collect();
                let types: Vec<&TensorType> = data.iter().map(|d| &d.ty).collect();
                let ty = op.infer(&types).expect("invariant: terms are checked before").remove(0);
                let sharded = match op {
                    Op::AllGather(_) => false,
                    _ => data.iter().any(|d| d.sharded),
                };
                Data { ty, sharded, stage: stage(*region), made_for }
            }
        }
    }

    fn merge(&mut self, a: &mut Data, b: Data) -> DidMerge {
        let before = a.clone();
        a.stage = a.stage.min(b.stage);
        a.made_for = a.made_for.min(b.made_for);
        // Types and sharding are equal: rules are checked before.
        let merged = Data { ty: b.ty.clone(), sharded: b.sharded, ..a.clone() };
        DidMerge(*a != before, merged != b)
    }
}
