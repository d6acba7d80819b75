//! What a rank holds of a parameter, and where.

use super::{ParamHome, Plan};
use std::ops::Range;

/// Elements of one parameter that one rank holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Held {
    /// The elements of the parameter; empty if the rank holds none.
    pub elements: Range<usize>,
    /// The buffer.
    pub buffer: usize,
    /// Their first byte within the buffer.
    pub offset: usize,
    /// Their number of bytes.
    pub bytes: usize,
}

impl Plan {
    /// What `rank` holds of a parameter, by its index; `None` if the plan does not use it.
    pub fn held(&self, param: usize, rank: usize) -> Option<Held> {
        let spec = self.params.get(param)?;
        match spec.home {
            ParamHome::Buffer(buffer) => {
                let (elements, bytes) = (0..spec.ty.shape.numel(), spec.ty.bytes());
                Some(Held { elements, buffer, offset: 0, bytes })
            }
            ParamHome::Group { group, .. } => {
                let group = self.groups.get(group)?;
                let segment = group.segments.iter().find(|s| s.param == param)?;
                let (begin, from, len) = group.owned(segment, rank).unwrap_or((0, 0, 0));
                let (elements, buffer) = (begin..begin + len, group.master);
                Some(Held { elements, buffer, offset: from * 4, bytes: len * 4 })
            }
            ParamHome::Unused => None,
        }
    }
}
