//! What the throughput of a plan counts: tokens or examples.

use super::{IndexKind, Plan};

/// What is counted, and how many of it an element of the loss stands for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Counted {
    /// `tokens` or `examples`.
    pub unit: &'static str,
    /// Number per element of the loss.
    pub per_element: f64,
}

impl Plan {
    /// Tokens where an input of token ids has one for each element of the loss, otherwise examples: the loss of an image may have an element
    /// per pixel, and a loss that the model computes has one for all examples.
    pub fn counted(&self) -> Counted {
        let examples = self.batch().unwrap_or(1);
        let has_tokens = self.inputs.iter().any(|input| {
            let is_embedded = input.ranges.iter().any(|range| range.kind == IndexKind::Row);
            is_embedded && input.ty.shape.numel() >= self.loss_capacity
        });
        match has_tokens && self.loss_capacity > examples {
            true => Counted { unit: "tokens", per_element: 1.0 },
            false => {
                let per_element = examples as f64 / self.loss_capacity.max(1) as f64;
                Counted { unit: "examples", per_element }
            }
        }
    }
}
