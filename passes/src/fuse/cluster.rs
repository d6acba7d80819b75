//! Clusters: sets of nodes that will become one region, with what they read and write.

use super::facts::Facts;
use super::{Rules, emit, inductor, region};
use frit_ir::ops::{FusionKind, Op};
use frit_ir::{Graph, ValueId};
use std::borrow::Cow;
use std::cell::RefCell;
use std::collections::{HashMap, HashSet};

/// Index of a cluster.
pub(super) type ClusterId = usize;

/// One region.
#[derive(Clone, Debug)]
pub(super) struct Cluster {
    pub(super) kind: FusionKind,
    /// Positions of its nodes, ascending.
    pub(super) members: Vec<usize>,
    /// Those of its nodes that are copies: the originals stay nodes of the graph for their other readers.
    pub(super) copies: Vec<usize>,
}

impl Cluster {
    /// Its nodes without copies, which determine the region's place in the graph.
    pub(super) fn own(&self) -> Cow<'_, [usize]> {
        if self.copies.is_empty() {
            return Cow::Borrowed(&self.members);
        }
        self.members.iter().copied().filter(|m| !self.copies.contains(m)).collect()
    }
}

/// What a region reads and writes.
#[derive(Clone, Debug, Default)]
pub(super) struct Interface {
    /// Values read (a reshape of a base counts as a separate value), in order of first use.
    pub(super) operands: Vec<ValueId>,
    /// Bases written, in order of definition.
    pub(super) results: Vec<ValueId>,
    /// Bytes of both; operands that are reshapes of one value count once.
    pub(super) bytes: u64,
}

impl Interface {
    /// The same without the results of these nodes.
    pub(super) fn without(mut self, facts: &Facts<'_>, copies: &[usize]) -> Interface {
        let is_copy = |v: &ValueId| copies.contains(&facts.def(*v));
        let bytes = |v: &ValueId| facts.graph.ty(*v).bytes() as u64;
        self.bytes -= self.results.iter().filter(|v| is_copy(v)).map(bytes).sum::<u64>();
        self.results.retain(|v| !is_copy(v));
        self
    }

    /// The same, with operands that are reshapes of another operand reshaped inside, so that a library kernel knows
    /// that both are the same memory.
    pub(super) fn of_library(mut self, facts: &Facts<'_>) -> Interface {
        let all = self.operands.clone();
        self.operands.retain(|&operand| {
            let mut v = operand;
            while let Op::Reshape(_) = facts.graph.def(v).op {
                v = facts.graph.def(v).inputs[0];
                if all.contains(&v) {
                    return false;
                }
            }
            true
        });
        self
    }
}

/// All regions so far.
pub(super) struct Clusters<'f, 'g> {
    pub(super) facts: &'f Facts<'g>,
    supported: fn(&Graph, FusionKind) -> bool,
    pub(super) rules: Rules,
    /// Cached answers by kind and text of the body, since blocks repeat.
    known: RefCell<HashMap<(FusionKind, String), bool>>,
    pub(super) clusters: Vec<Option<Cluster>>,
    /// The cluster that writes what a node computes, by position.
    pub(super) owner: Vec<Option<ClusterId>>,
    /// The clusters that compute a node, by position.
    pub(super) computed_by: Vec<Vec<ClusterId>>,
    /// Maximum distance in positions between members of a cluster.
    pub(super) longest: usize,
}

impl<'f, 'g> Clusters<'f, 'g> {
    pub(super) fn new(
        facts: &'f Facts<'g>,
        supported: fn(&Graph, FusionKind) -> bool,
        rules: Rules,
    ) -> Self {
        let n = facts.order.len();
        Clusters {
            facts,
            supported,
            rules,
            known: RefCell::default(),
            clusters: Vec::new(),
            owner: vec![None; n],
            computed_by: vec![Vec::new(); n],
            longest: 0,
        }
    }

    /// Makes a cluster of every node that can be a region by itself.
    pub(super) fn seed(&mut self) {
        for position in 0..self.owner.len() {
            if self.owner[position].is_some()
                || !region::is_fusable(self.facts, self.facts.node(position))
            {
                continue;
            }
            if let Some(kind) = self.kind_of(&[position], &[]) {
                self.add(Cluster { kind, members: vec![position], copies: vec![] });
            }
        }
    }

    /// Adds a cluster that owns its members.
    pub(super) fn add(&mut self, cluster: Cluster) -> ClusterId {
        let id = self.clusters.len();
        self.extend(&cluster.members);
        for &member in cluster.own().iter() {
            self.owner[member] = Some(id);
            self.computed_by[member] = vec![id];
        }
        self.clusters.push(Some(cluster));
        id
    }

    /// Adds nodes without a cluster to a cluster; positions ascending.
    pub(super) fn grow(&mut self, id: ClusterId, members: Vec<usize>) {
        self.extend(&members);
        for &member in &members {
            if self.owner[member].is_none() {
                self.owner[member] = Some(id);
                self.computed_by[member] = vec![id];
            }
        }
        if let Some(cluster) = &mut self.clusters[id] {
            cluster.members = members;
        }
    }

    /// Updates `longest` for the members of a cluster.
    fn extend(&mut self, members: &[usize]) {
        let span = members.last().zip(members.first()).map_or(0, |(last, first)| last - first);
        self.longest = self.longest.max(span);
    }

    /// Removes a cluster; its members are free again.
    pub(super) fn remove(&mut self, id: ClusterId) {
        for member in self.clusters[id].take().map_or(vec![], |c| c.members) {
            self.owner[member] = None;
            self.computed_by[member].clear();
        }
    }

    /// The kind of the region formed by these members in place of the clusters `replaced`, if it is legal and can be
    /// compiled.
    pub(super) fn kind_of(&self, members: &[usize], replaced: &[ClusterId]) -> Option<FusionKind> {
        let kind = region::kind(self.facts, members)?;
        let interface = self.interface(members, replaced);
        let may_be_result = |v: &ValueId| {
            region::may_be_result(self.facts, kind, self.facts.node(self.facts.def(*v)))
        };
        let fits = interface.results.iter().all(may_be_result)
            && region::results_fit(self.facts, kind, &interface.results);
        let fits = fits
            && (self.rules == Rules::Frit
                || inductor::forms(self.facts, kind, members, &interface.results));
        if !fits {
            return None;
        }
        // Its results are unused: it is removed and needs no kernel.
        if interface.results.is_empty() {
            return Some(kind);
        }
        let body = emit::body(self.facts, kind, members, &interface).ok()?;
        self.is_supported(&body, kind).then_some(kind)
    }

    /// Whether a region with this body can be compiled.
    pub(super) fn is_supported(&self, body: &Graph, kind: FusionKind) -> bool {
        let key = (kind, body.to_string());
        *self.known.borrow_mut().entry(key).or_insert_with(|| (self.supported)(body, kind))
    }

    pub(super) fn cluster(&self, id: ClusterId) -> Option<&Cluster> {
        self.clusters[id].as_ref()
    }

    /// What the members read and write in place of the clusters `replaced`. A node that no cluster owns counts as owned
    /// by the members.
    pub(super) fn interface(&self, members: &[usize], replaced: &[ClusterId]) -> Interface {
        let facts = self.facts;
        let mut interface = Interface::default();
        let (mut seen, mut read) = (HashSet::new(), HashSet::new());
        let has = |position: usize| members.binary_search(&position).is_ok();
        for &member in members {
            let node = facts.node(member);
            for &input in &node.inputs {
                if has(facts.source(input)) || facts.is_splat(input) || !seen.insert(input) {
                    continue;
                }
                interface.operands.push(input);
                if read.insert(facts.base(input)) {
                    interface.bytes += facts.graph.ty(input).bytes() as u64;
                }
            }
            if self.owner[member].is_some_and(|owner| !replaced.contains(&owner)) {
                continue;
            }
            for &output in &node.outputs {
                if self.is_read_outside(output, member, members, replaced) {
                    interface.results.push(output);
                    interface.bytes += facts.graph.ty(output).bytes() as u64;
                }
            }
        }
        interface
    }

    fn is_read_outside(
        &self,
        base: ValueId,
        position: usize,
        members: &[usize],
        replaced: &[ClusterId],
    ) -> bool {
        if self.facts.escapes(base) {
            return true;
        }
        self.facts.uses(base).iter().any(|user| {
            let by = &self.computed_by[*user];
            if by.is_empty() {
                return members.binary_search(user).is_err();
            }
            by.iter().any(|&cluster| {
                !replaced.contains(&cluster)
                    && self
                        .cluster(cluster)
                        .is_some_and(|c| c.members.binary_search(&position).is_err())
            })
        })
    }

    /// What cluster `id` reads and writes.
    pub(super) fn interface_of(&self, id: ClusterId) -> Interface {
        self.cluster(id).map_or_else(Interface::default, |c| {
            let interface = self.interface(&c.members, &[id]).without(self.facts, &c.copies);
            match c.kind {
                FusionKind::Gemm => interface.of_library(self.facts),
                _ => interface,
            }
        })
    }

    /// Bytes that all regions read and write.
    pub(super) fn bytes(&self) -> u64 {
        (0..self.clusters.len()).map(|id| self.interface_of(id).bytes).sum()
    }
}
