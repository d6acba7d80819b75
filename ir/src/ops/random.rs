//! Random numbers and masks from a counter-based generator.
//!
//! A number is a function of the generator's state, the node's id, and the global index of the element across
//! ranks and micro-steps. It is therefore the same on every device and however often it is recomputed. Each
//! micro-step of each rank has a position in the order in which data is read; element `e` of a tensor of `n`
//! elements has the index `position · n + e`. If the batch is the first axis, an example gets the same numbers
//! for every split of the global batch into ranks, micro-steps and batches.
//!
//! Number `i` is word `i mod 4` of the Philox block with the counter (low and high half of `i div 4`, `id`, 0)
//! and the key (low and high half of the seed). Source: Salmon et al. 2011, Philox4x32-10.

use super::number::by_bits;
use super::{Inferred, Linear, Op, OpError, Operation, Precision, State, StateName, arity};
use crate::{DType, Graph, GraphError, Origin, Region, Shape, TensorType, ValueId};
use serde::{Deserialize, Serialize};

/// `rng: i64[5]` → `bool[shape]`, each element true with probability `keep`: if its word is below
/// `keep · 2³²`. The mask of a dropout, which evaluation does without.
#[derive(Clone, Debug, Serialize, Deserialize)]
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

by_bits!(RandomMask { keep } { shape, id });

/// A distribution.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RandomFn {
    /// Between 0 and 1, neither of them: `(2k + 1) · 2⁻²⁴` for the upper 23 bits `k` of the word.
    Uniform,
    /// With mean 0 and variance 1, by Box and Muller's transform of an even word and its odd neighbor:
    /// `√(−2 ln u) · cos 2πv`, then `sin`, with `u` and `v` the words over 2³², the lowest bit of the first
    /// one set and then rounded to f32.
    Normal,
}

/// `rng: i64[5]` → `f32[shape]`: `offset + scale · z`, with `z` drawn from `f`; a uniform number stays below
/// `offset + scale` where rounding would reach it.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Random {
    /// Distribution of `z`.
    pub f: RandomFn,
    /// Dimensions of the result.
    pub shape: Shape,
    /// The offset.
    #[serde(with = "super::number")]
    pub offset: f64,
    /// The factor, not negative.
    #[serde(with = "super::number")]
    pub scale: f64,
    /// The number of these draws in the model.
    pub id: u32,
}

by_bits!(Random { offset, scale } { f, shape, id });

impl Operation for RandomMask {
    fn examples() -> Vec<Self> {
        vec![RandomMask { shape: Shape::from([2, 3]), keep: 0.9, id: 4 }]
    }

    fn infer(&self, inputs: &[&TensorType]) -> Inferred {
        of_state(inputs)?;
        if !(0.0..=1.0).contains(&self.keep) {
            return Err(OpError::new(format!("keep = {} is not a probability", self.keep)));
        }
        Ok(vec![TensorType::new(DType::Bool, self.shape.clone())])
    }

    fn precision(&self) -> Precision {
        Precision::INTEGER
    }

    fn linear(&self) -> Linear {
        Linear::No
    }
}

impl Random {
    /// The largest number that can be the result.
    pub fn most(&self) -> f32 {
        match self.f {
            RandomFn::Normal => f32::INFINITY,
            RandomFn::Uniform if self.scale == 0.0 => self.offset as f32,
            RandomFn::Uniform => ((self.offset + self.scale) as f32).next_down(),
        }
    }
}

impl Operation for Random {
    fn examples() -> Vec<Self> {
        vec![Random {
            f: RandomFn::Normal,
            shape: Shape::from([2, 3]),
            offset: 0.5,
            scale: 2.0,
            id: 1,
        }]
    }

    fn infer(&self, inputs: &[&TensorType]) -> Inferred {
        of_state(inputs)?;
        let within = |x: f64| (x as f32).is_finite();
        if !within(self.offset) || !within(self.scale) || self.scale < 0.0 {
            let Random { offset, scale, .. } = self;
            let message = format!("numbers cannot be {offset} + {scale} times what is drawn");
            return Err(OpError::new(message));
        }
        Ok(vec![TensorType::new(DType::F32, self.shape.clone())])
    }

    fn precision(&self) -> Precision {
        Precision::INTEGER
    }

    fn linear(&self) -> Linear {
        Linear::No
    }
}

/// Type of the generator's state.
pub fn state_type() -> TensorType {
    TensorType::new(DType::I64, [5])
}

/// The state of a rank before its first micro-step.
pub fn first_state(seed: u64, rank: usize, ranks: usize, accumulation: usize) -> [i64; 5] {
    [seed as i64, rank as i64, 0, ranks as i64, accumulation as i64]
}

/// The state for batch `number` of an evaluation on a rank: draws of its own, the same whenever the batch is
/// evaluated.
pub fn evaluation_state(seed: u64, rank: usize, ranks: usize, number: usize) -> [i64; 5] {
    let own = seed ^ 0x6576_616c_0000_0000;
    [own as i64, rank as i64, number as i64, ranks as i64, 1]
}

/// The position of a state's micro-step: of a step, each rank reads its part of the data in one piece.
pub fn position(state: &[i64]) -> u64 {
    let [rank, count, ranks, accumulation] = [1, 2, 3, 4].map(|i| state[i] as u64);
    let accumulation = accumulation.max(1);
    let (step, micro_step) = (count / accumulation, count % accumulation);
    step.wrapping_mul(ranks).wrapping_add(rank).wrapping_mul(accumulation).wrapping_add(micro_step)
}

/// The state of the generator, of which a graph has one; it is added if there is none.
///
/// # Errors
/// If the graph does not take the node, which would be a bug.
pub fn generator(graph: &mut Graph, origin: &Origin) -> Result<ValueId, GraphError> {
    let known = graph.nodes().find_map(|(_, n)| match &n.op {
        Op::State(s) if s.name == StateName::Rng => Some(n.outputs[0]),
        _ => None,
    });
    if let Some(state) = known {
        return Ok(state);
    }
    let (name, ty) = (StateName::Rng, state_type());
    let state = Op::State(State { name, of: None, ty, init: 0.0, sharded: false });
    let state = graph.add1(state, &[], origin.clone(), Region::Forward)?;
    graph.set_name(state, StateName::Rng.word());
    Ok(state)
}

/// The number of the next draws of a graph. Numbers from 2³¹ on are those of draws with a seed of their own.
pub fn next_id(graph: &Graph) -> u32 {
    let ids = graph.nodes().filter_map(|(_, n)| match &n.op {
        Op::RandomMask(mask) => Some(mask.id),
        Op::Random(random) => Some(random.id),
        _ => None,
    });
    ids.filter(|id| *id < 1 << 31).max().map_or(0, |id| id + 1)
}

fn of_state(inputs: &[&TensorType]) -> Result<(), OpError> {
    arity(inputs, 1)?;
    let wanted = state_type();
    if *inputs[0] != wanted {
        return Err(OpError::new(format!("the state must be {wanted}, not {}", inputs[0])));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions_follow_the_data_whatever_reads_it() {
        // Rank r of R takes, of each step, its A parts in one piece.
        for (ranks, accumulation) in [(1, 6), (2, 3), (3, 2), (6, 1)] {
            let mut seen = Vec::new();
            for step in 0..2 {
                for rank in 0..ranks {
                    for micro in 0..accumulation {
                        let mut state = first_state(7, rank, ranks, accumulation);
                        state[2] = (step * accumulation + micro) as i64;
                        seen.push(position(&state));
                    }
                }
            }
            assert_eq!(seen, (0..12).collect::<Vec<u64>>());
        }
        // A state of zeros has a position too.
        assert_eq!(position(&[0; 5]), 0);
    }
}
