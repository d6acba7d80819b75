//! Assigns buffers to leaves: inputs, parameters, state, hyper-parameters, large constants.

use super::Lowering;
use frit_ir::plan::{
    Arena, BufferClass, ConstantSpec, HyperSpec, InputSpec, ParamHome, Place, StateSpec,
};
use frit_ir::{Diagnostic, Op, Tensor};

impl Lowering<'_> {
    pub(super) fn place_leaves(&mut self) -> Result<(), Diagnostic> {
        let graph = self.graph;
        for (_, node) in graph.nodes() {
            let Some(&value) = node.outputs.first() else { continue };
            let ty = graph.ty(value).clone();
            let place = match &node.op {
                Op::Input(input) => {
                    let (arena, class) = (Arena::Persistent, BufferClass::Input);
                    let buffer = self.buffer(&input.name, arena, class, ty.bytes());
                    self.plan.inputs.push(InputSpec {
                        name: input.name.clone(),
                        ty: ty.clone(),
                        buffer,
                        per_example: ty.shape.rank() > 0,
                        ranges: Vec::new(),
                    });
                    Place { buffer, offset: 0, ty }
                }
                Op::Param(param) => match self.group_of.get(&param.name) {
                    // A sharded parameter is only read through its group.
                    Some(_) if param.sharded => continue,
                    Some(&(group, segment)) => {
                        let group = &self.plan.groups[group];
                        let offset = group.segments[segment].offset * group.dtype.size();
                        Place { buffer: group.master, offset, ty }
                    }
                    None => {
                        let (arena, class) = (Arena::Persistent, BufferClass::Parameter);
                        let buffer = self.buffer(&param.name, arena, class, ty.bytes());
                        let spec = self.plan.params.iter_mut().find(|p| p.name == param.name);
                        if let Some(spec) = spec {
                            spec.home = ParamHome::Buffer(buffer);
                        }
                        Place { buffer, offset: 0, ty }
                    }
                },
                Op::State(state) if state.of.is_none() => {
                    let (arena, class) = (Arena::Persistent, BufferClass::State);
                    let buffer = self.buffer(&state.name.to_string(), arena, class, ty.bytes());
                    self.plan.states.push(StateSpec {
                        name: state.name.clone(),
                        ty: ty.clone(),
                        init: state.init,
                        buffer,
                    });
                    Place { buffer, offset: 0, ty }
                }
                Op::Hyper(hyper) => {
                    let (arena, class) = (Arena::Persistent, BufferClass::State);
                    let buffer = self.buffer(&hyper.name, arena, class, 4);
                    self.plan.hyper.push(HyperSpec {
                        name: hyper.name.clone(),
                        value: hyper.default,
                        buffer,
                    });
                    Place { buffer, offset: 0, ty }
                }
                _ => continue,
            };
            self.places.insert(value, place);
        }
        Ok(())
    }

    /// The buffer of a constant that is not embedded in a kernel.
    pub(super) fn constant(&mut self, value: &Tensor) -> Place {
        let name = format!("constant.{}", self.constants.len());
        let (arena, class) = (Arena::Persistent, BufferClass::State);
        let buffer = self.buffer(&name, arena, class, value.ty.bytes());
        let spec = ConstantSpec { name: name.clone(), ty: value.ty.clone(), buffer, digest: None };
        self.plan.constants.push(spec);
        self.constants.push((name, value.clone()));
        Place { buffer, offset: 0, ty: value.ty.clone() }
    }
}
