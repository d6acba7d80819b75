//! Random masks from a counter-based generator.
//!
//! A mask is a function of the generator's state and of the node's own number, so that it is the same
//! wherever and however often it is computed. The state `[seed, rank, count]` differs by rank; the count
//! rises with every micro-step. Source: Salmon et al. 2011, Philox4x32-10.

use super::{Inferred, OpError, arity};
use crate::{DType, Shape, TensorType};
use serde::{Deserialize, Serialize};

/// Name of the state `[seed, rank, count]`.
pub const RNG: &str = "rng";

/// `rng: i64[3]` → `bool[shape]`, each element true with probability `keep`.
///
/// Element `e` is word `e mod 4` of the Philox block with the counter (low and high half of `e div 4`,
/// `id`, count) and the key (seed, rank); it is true if the word is below `keep · 2³²`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RandomMask {
    /// Dimensions of the mask.
    pub shape: Shape,
    /// How likely an element is true.
    #[serde(with = "super::number")]
    pub keep: f64,
    /// The number of this mask in the model.
    pub id: u32,
}

impl RandomMask {
    pub(super) fn infer(&self, inputs: &[&TensorType]) -> Inferred {
        arity(inputs, 1)?;
        if *inputs[0] != state_type() {
            return Err(OpError::new(format!(
                "the state must be {}, not {}",
                state_type(),
                inputs[0]
            )));
        }
        if !(0.0..=1.0).contains(&self.keep) {
            return Err(OpError::new(format!("keep = {} is no probability", self.keep)));
        }
        Ok(vec![TensorType::new(DType::Bool, self.shape.clone())])
    }
}

/// Type of the generator's state.
pub fn state_type() -> TensorType {
    TensorType::new(DType::I64, [3])
}
