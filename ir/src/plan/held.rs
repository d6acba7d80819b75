//! The elements of a parameter that a rank holds, and their place.

use super::{BufferId, ParamHome, ParamId, ParamSpec, Plan};
use crate::DType;
use crate::ops::Init;
use std::ops::Range;

/// Elements of one parameter on one rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Held {
    /// The elements of the parameter; empty if the rank has none.
    pub elements: Range<usize>,
    /// The dtype in which they are stored.
    pub dtype: DType,
    /// The buffer.
    pub buffer: BufferId,
    /// Their first byte within the buffer.
    pub offset: usize,
    /// Their number of bytes.
    pub bytes: usize,
}

impl Plan {
    /// Whether a step changes a parameter, by its index: it trains, or it is a buffer that some task updates.
    pub fn is_changed(&self, param: ParamId) -> bool {
        let written = |buffer: BufferId| {
            self.tasks.iter().any(|t| t.action.writes().iter().any(|p| p.buffer == buffer))
        };
        match self.params.get(param).map(|p| p.home) {
            Some(ParamHome::Group { group, .. }) => {
                self.groups.get(group).is_some_and(|g| g.trainable)
            }
            Some(ParamHome::Buffer(buffer)) => written(buffer),
            Some(ParamHome::Unused) | None => false,
        }
    }

    /// Whether a parameter, by its index, has its value from a run and not from the model: a step changes it, or it is a matrix of an adapter,
    /// which is drawn.
    pub fn is_of_run(&self, param: ParamId) -> bool {
        let has = |name: &str| self.params.iter().any(|p| p.name == name);
        let is_of_adapter = |p: &ParamSpec| {
            let suffixes = [".lora_A.weight", ".lora_B.weight"];
            let module = suffixes.into_iter().find_map(|suffix| p.name.strip_suffix(suffix));
            p.init != Init::Weights
                && module.is_some_and(|module| has(module) || has(&format!("{module}.weight")))
        };
        self.is_changed(param) || self.params.get(param).is_some_and(is_of_adapter)
    }

    /// The elements of a parameter, by its index, on `rank`; `None` if the plan does not use it.
    pub fn held(&self, param: ParamId, rank: usize) -> Option<Held> {
        let spec = self.params.get(param)?;
        match spec.home {
            ParamHome::Buffer(buffer) => {
                let (elements, bytes) = (0..spec.ty.shape.numel(), spec.ty.bytes());
                Some(Held { elements, dtype: spec.ty.dtype, buffer, offset: 0, bytes })
            }
            ParamHome::Group { group, .. } => {
                let group = self.groups.get(group)?;
                let segment = group.segments.iter().find(|s| s.param == param)?;
                let (begin, from, len) = group.owned(segment, rank).unwrap_or((0, 0, 0));
                let (elements, dtype, buffer) = (begin..begin + len, group.dtype, group.master);
                let (offset, bytes) = (from * dtype.size(), len * dtype.size());
                Some(Held { elements, dtype, buffer, offset, bytes })
            }
            ParamHome::Unused => None,
        }
    }
}
