//! What a step leaves: the next values of parameters and state, gradients, metrics and results, and what the next step begins with.

use super::flat::{Flat, Piece, What};
use super::{Leaf, Machine, Stated, Tasks, refused, rules};
use frit_ir::ops::{Cast, Expand, StateName};
use frit_ir::plan::{BufferId, MetricName, Place, Segment};
use frit_ir::{Graph, Op, Origin, OutputKind, Region, Shape, TensorType, ValueId};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::rc::Rc;

/// Whether state is reset after every step. Levels of a tree are read only after the step wrote them.
fn is_reset(state: &StateName) -> bool {
    state.is_within_step() && !matches!(state, StateName::Partial(_))
}

impl Machine<'_> {
    /// Notes what a micro-step makes of the state within a step.
    pub(super) fn keep_within(&mut self) -> Stated<()> {
        for place in self.places(|state| state.is_some_and(StateName::is_within_step)) {
            let flat = self.flat(&place)?;
            self.within.insert(place.buffer, flat);
        }
        Ok(())
    }

    /// The places of leaves of this state, each once.
    fn places(&self, of: impl Fn(Option<&StateName>) -> bool) -> Vec<Place> {
        let chosen = self.leaves.iter().filter(|leaf| of(leaf.state.as_ref()));
        let places: BTreeMap<BufferId, &Place> =
            chosen.map(|leaf| (leaf.place.buffer, &leaf.place)).collect();
        places.into_values().cloned().collect()
    }

    /// The graph of the tasks, and that which it is compared with.
    pub(super) fn outputs(mut self, graph: &Graph) -> Stated<Tasks> {
        self.origin = Origin::none();
        self.region = Region::Update;
        let mut kept: HashMap<BufferId, Rc<Flat>> = HashMap::new();
        for place in self.places(|_| true) {
            let flat = self.flat(&place)?;
            kept.insert(place.buffer, flat);
        }
        for place in self.places(|state| state.is_some_and(is_reset)) {
            if kept[&place.buffer].pieces.iter().any(|piece| piece.what != What::Zero) {
                let name = &self.plan.buffers[place.buffer].name;
                return Err(refused(format!("`{name}` is not zero after the step")));
            }
        }
        kept.extend(std::mem::take(&mut self.within));
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
        let expected = rules::written_out(&with_whole_gradients(graph)?)?;
        Ok(Tasks { expected, computed: self.graph })
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
                let inside = |piece: &Piece| {
                    group.segments.iter().any(|s| {
                        s.offset <= piece.begin && piece.begin + piece.numel <= s.offset + s.numel
                    })
                };
                let is_kept = |piece: &Piece| match piece.what {
                    What::Of(..) => inside(piece),
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
            let next = match shape.numel() {
                0 => value,
                _ => self.segment(&kept[&place.buffer], begin, &shape)?,
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
        let own = Flat { dtype: flat.dtype, numel, shards: 1, pieces, gradients: None };
        self.whole(&own, shape)
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
