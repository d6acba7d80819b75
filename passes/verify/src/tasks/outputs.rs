//! What a step leaves: the next values of parameters and state, gradients, metrics and results, and what the next step begins with.

use super::flat::{Flat, Piece, What, is_of_one};
use super::{Leaf, Machine, Stated, Tasks, refused, rules};
use frit_ir::ops::{Cast, Expand, StateName};
use frit_ir::plan::{BufferId, GroupId, MetricName, Place, Segment};
use frit_ir::{Graph, Op, Origin, OutputKind, Region, Shape, TensorType, ValueId};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Range;
use std::rc::Rc;

/// Whether state is reset after every step. Levels of a tree are read only after the step wrote them.
fn is_reset(state: &StateName) -> bool {
    state.is_within_step() && !matches!(state, StateName::Partial(_))
}

impl Machine<'_> {
    /// What the leaves hold now, by buffer.
    pub(super) fn held(&mut self) -> Stated<HashMap<BufferId, Rc<Flat>>> {
        let places = self.places(|_| true).into_iter();
        places.map(|place| Ok((place.buffer, self.flat(&place)?))).collect()
    }

    /// Notes what a micro-step makes of the leaves that it changes.
    pub(super) fn keep(&mut self) -> Stated<()> {
        let begun = std::mem::take(&mut self.begun);
        let is_other = |(buffer, flat): &(BufferId, Rc<Flat>)| begun.get(buffer) != Some(flat);
        self.changed = self.held()?.into_iter().filter(is_other).collect();
        Ok(())
    }

    /// The state that a leaf is, if it is not a parameter.
    pub(super) fn state(&self, leaf: &Leaf) -> Option<&StateName> {
        match &self.graph.def(leaf.value).op {
            Op::State(state) => Some(&state.name),
            _ => None,
        }
    }

    /// The places of leaves of this state, each once.
    fn places(&self, of: impl Fn(Option<&StateName>) -> bool) -> Vec<Place> {
        let chosen = self.leaves.iter().filter(|leaf| of(self.state(leaf)));
        let places: BTreeMap<BufferId, &Place> =
            chosen.map(|leaf| (leaf.place.buffer, &leaf.place)).collect();
        places.into_values().cloned().collect()
    }

    /// The graph of the tasks, and that which it is compared with.
    pub(super) fn outputs(mut self, graph: &Graph) -> Stated<Tasks> {
        self.origin = Origin::none();
        self.region = Region::Update;
        let mut kept = self.held()?;
        for place in self.places(|state| state.is_some_and(is_reset)) {
            if kept[&place.buffer].pieces.iter().any(|piece| piece.what != What::Zero) {
                let name = &self.plan.buffers[place.buffer].name;
                return Err(refused(format!("`{name}` is not zero after the step")));
            }
        }
        // What a micro-step changes, the next one begins with, so nothing else may change it in between.
        for place in self.places(|state| !state.is_some_and(StateName::is_within_step)) {
            let changed = self.changed.get(&place.buffer);
            if changed.is_some_and(|flat| *flat != kept[&place.buffer]) {
                let name = &self.plan.buffers[place.buffer].name;
                let what = format!("`{name}` is changed by the micro-steps and again by the step");
                return Err(refused(what));
            }
        }
        kept.extend(std::mem::take(&mut self.changed));
        self.check_gaps(&kept)?;
        self.check_copies(&kept)?;
        self.carries(graph, &kept)?;
        self.gradients(graph)?;
        for output in &graph.outputs {
            let place = match output.kind {
                OutputKind::Metric => {
                    let name = MetricName::of(&output.name);
                    let metric = self.plan.metrics.iter().find(|m| Some(&m.name) == name.as_ref());
                    metric.map(|metric| metric.place.clone())
                }
                OutputKind::Result => self.result(&output.name),
                _ => continue,
            };
            let Some(place) = place else { continue };
            let flat = self.flat(&place)?;
            let value = self.whole(&flat, &place.ty.shape)?;
            self.graph.add_output(&output.name, value, output.kind);
        }
        self.check_names(graph)?;
        let expected = rules::written_out(&with_whole_gradients(graph)?)?;
        Ok(Tasks { expected, computed: self.graph })
    }

    /// Whether the graph has all metrics and results that the plan names.
    fn check_names(&self, graph: &Graph) -> Stated<()> {
        let has = |kind: OutputKind, is: &dyn Fn(&str) -> bool| {
            graph.outputs.iter().any(|output| output.kind == kind && is(&output.name))
        };
        let is_metric = |name: &MetricName| {
            has(OutputKind::Metric, &|n| MetricName::of(n).as_ref() == Some(name))
        };
        let other = self.plan.metrics.iter().find(|metric| !is_metric(&metric.name));
        let is_result = |name: &str| has(OutputKind::Result, &|n| n == name);
        let results = self.plan.eval.iter().flat_map(|eval| &eval.outputs);
        let other = other
            .map(|metric| metric.name.to_string())
            .or_else(|| results.map(|o| o.name.clone()).find(|name| !is_result(name)));
        match other {
            Some(name) => Err(refused(format!("the graph has no `{name}`"))),
            None => Ok(()),
        }
    }

    /// Where a result of an evaluation is; the statistics are what is no output of the model.
    fn result(&self, name: &str) -> Option<Place> {
        let eval = self.plan.eval.as_ref()?;
        let output = eval.outputs.iter().find(|output| output.name == name);
        output.map(|output| output.place.clone()).or_else(|| eval.statistics.clone())
    }

    /// Elements that are of no parameter stay zero.
    fn check_gaps(&self, kept: &HashMap<BufferId, Rc<Flat>>) -> Stated<()> {
        for group in &self.plan.groups {
            let states = group.states.iter().map(|state| state.buffer);
            for buffer in [group.master].into_iter().chain(states) {
                let Some(flat) = kept.get(&buffer) else { continue };
                let is_kept = |piece: &Piece| match piece.what {
                    What::Of(..) => is_of_one(piece, &group.segments),
                    What::Zero => true,
                    What::Unknown => self.plan.eval.is_some(),
                };
                if !flat.pieces.iter().all(is_kept) {
                    let name = &self.plan.buffers[buffer].name;
                    return Err(refused(format!("padding of `{name}` does not stay zero")));
                }
            }
        }
        Ok(())
    }

    /// Copies of parameters in other dtypes are casts of the parameters that the step leaves.
    fn check_copies(&mut self, kept: &HashMap<BufferId, Rc<Flat>>) -> Stated<()> {
        for group in &self.plan.groups {
            let master = kept.get(&group.master);
            for copy in &group.copies {
                let ty = TensorType::new(copy.dtype, [group.shard_numel]);
                let flat = self.flat(&Place { buffer: copy.buffer, offset: 0, ty })?;
                let is_cast = |(piece, of): (&Piece, &Piece)| match (piece.what, of.what) {
                    (What::Of(value, 0), What::Of(param, 0)) => {
                        let node = self.graph.def(value);
                        node.op == Op::Cast(Cast { to: copy.dtype }) && node.inputs == [param]
                    }
                    (one, other) => one == other,
                };
                let alike = master.is_some_and(|master| {
                    master.begins().eq(flat.begins())
                        && flat.pieces.iter().zip(&master.pieces).all(is_cast)
                });
                if !alike {
                    let name = &self.plan.buffers[copy.buffer].name;
                    let what = format!("`{name}` is not the cast of the parameters after the step");
                    return Err(refused(what));
                }
            }
        }
        Ok(())
    }

    /// The next values of parameters and state: of those for which the graph has one, and of those that change.
    fn carries(&mut self, graph: &Graph, kept: &HashMap<BufferId, Rc<Flat>>) -> Stated<()> {
        let carried: BTreeSet<String> =
            graph.outputs.iter().map(|output| crate::key_of(graph, output)).collect();
        for Leaf { value, place, begin, .. } in std::mem::take(&mut self.leaves) {
            let shape = self.graph.ty(value).shape.clone();
            let flat = &kept[&place.buffer];
            self.region = self.region_of(flat, begin..begin + shape.numel())?;
            let next = match shape.numel() {
                0 => value,
                _ => self.segment(flat, begin, &shape)?,
            };
            let name = self.graph.value(value).name.as_deref().unwrap_or("").to_string();
            self.graph.add_output(&name, next, OutputKind::Carry(value));
            let output = self.graph.outputs.last();
            let key = output.map(|output| crate::key_of(&self.graph, output));
            if next == value && !key.is_some_and(|key| carried.contains(&key)) {
                self.graph.outputs.pop();
            }
        }
        Ok(())
    }

    /// The part of a step that computed these elements.
    fn region_of(&self, flat: &Flat, elements: Range<usize>) -> Stated<Region> {
        let is_of = |p: &&Piece| p.begin < elements.end && elements.start < p.begin + p.numel;
        let mut region = None;
        for piece in flat.pieces.iter().filter(is_of) {
            let What::Of(value, _) = piece.what else { continue };
            let node = self.graph.def(value);
            let is_update = node.region == Region::Update;
            if !node.op.is_leaf() && region.replace(is_update).is_some_and(|one| one != is_update) {
                return Err(refused("a tensor is computed partly by the micro-steps"));
            }
        }
        Ok(if region == Some(false) { Region::Forward } else { Region::Update })
    }

    /// The elements of a flat tensor from this one on, in this shape.
    pub(super) fn segment(&mut self, flat: &Flat, begin: usize, shape: &Shape) -> Stated<ValueId> {
        let numel = shape.numel();
        let end = begin + numel;
        if end > flat.numel {
            return Err(refused("a tensor ends within a parameter"));
        }
        let inside = flat.pieces.iter().filter(|p| p.begin < end && begin < p.begin + p.numel);
        let pieces = inside.map(|piece| {
            let (from, to) = (piece.begin.max(begin), (piece.begin + piece.numel).min(end));
            let part = piece.part(from, to);
            Piece { begin: part.begin - begin, ..part }
        });
        // The parts of all ranks together.
        let pieces = pieces.collect();
        let own =
            Flat { dtype: flat.dtype, numel, shards: 1, pieces, gradients: None, resharded: false };
        self.whole(&own, shape)
    }

    /// The same tensor of a group, with each parameter as one piece: the parts of one whose gradient several tasks write are a
    /// concatenation in the graph.
    pub(super) fn joined(&mut self, flat: &Rc<Flat>, group: GroupId) -> Stated<Rc<Flat>> {
        let plan = self.plan;
        let group = &plan.groups[group];
        if flat.numel != group.numel {
            return Ok(flat.clone());
        }
        let mut pieces = flat.pieces.clone();
        for segment in &group.segments {
            let (begin, end) = (segment.offset, segment.offset + segment.numel);
            let [first, after] = [begin, end].map(|at| pieces.partition_point(|p| p.begin < at));
            let own = &pieces[first..after];
            let are_parts = own.len() > 1
                && own.iter().all(|piece| piece.what != What::Unknown)
                && is_of_one(&own[0], &[*segment])
                && is_of_one(&own[own.len() - 1], &[*segment]);
            if are_parts {
                let value = self.segment(flat, begin, &plan.params[segment.param].ty.shape)?;
                let whole = Piece { begin, numel: segment.numel, what: What::Of(value, 0) };
                pieces.splice(first..after, [whole]);
            }
        }
        Ok(Rc::new(Flat { pieces, ..Flat::clone(flat) }))
    }

    /// The reduced gradients, of those parameters for which the graph has one.
    fn gradients(&mut self, graph: &Graph) -> Stated<()> {
        let plan = self.plan;
        for output in graph.outputs.iter().filter(|o| o.kind == OutputKind::Gradient) {
            for (id, group) in plan.groups.iter_enumerated() {
                let is = |s: &&Segment| plan.params[s.param].name == output.name;
                let Some(segment) = group.segments.iter().find(is) else { continue };
                let Some(flat) = self.gradients.get(&id).cloned() else { continue };
                let shape = &plan.params[segment.param].ty.shape;
                let value = self.segment(&flat, segment.offset, shape)?;
                self.graph.add_output(&output.name, value, OutputKind::Gradient);
            }
        }
        Ok(())
    }
}

/// The graph with gradients in the shape of their parameters: what is equal along an axis may be there once.
fn with_whole_gradients(graph: &Graph) -> Stated<Graph> {
    let shapes: HashMap<String, Shape> =
        graph.params().map(|(_, param)| (param.name.clone(), param.ty.shape.clone())).collect();
    let mut whole = graph.clone();
    for k in 0..whole.outputs.len() {
        let output = whole.outputs[k].clone();
        let Some(shape) = shapes.get(&output.name).filter(|_| output.kind == OutputKind::Gradient)
        else {
            continue;
        };
        if whole.ty(output.value).shape != *shape {
            let op = Op::Expand(Expand { shape: shape.clone() });
            let region = whole.def(output.value).region;
            whole.outputs[k].value = whole.add(op, &[output.value], Origin::none(), region)?[0];
        }
    }
    Ok(whole)
}
