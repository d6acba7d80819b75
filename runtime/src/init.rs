//! Generates initial values of parameters that have an initializer instead of stored weights.
//!
//! They depend only on the seed, the parameter's name and the element's index, so they are the same for every rank, sharding
//! and thread.

use frit_ir::ops::Init;
use rand_chacha::ChaCha12Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use sha2::{Digest, Sha256};
use std::num::NonZero;
use std::ops::Range;

/// Elements that are worth a thread.
const PER_THREAD: usize = 1 << 20;

/// Elements `range`, in row-major order, of the parameter `name`; `None` for [`Init::Weights`], whose
/// values are stored. Long ranges are made on all cores.
///
/// Normal and uniform values come from a stream of ChaCha words, two per element, keyed by the SHA-256 of
/// seed and name; normal ones by Box and Muller's transform.
pub fn values(init: &Init, seed: u64, name: &str, range: Range<usize>) -> Option<Vec<f32>> {
    match init {
        Init::Weights => return None,
        Init::Constant(value) => return Some(vec![*value as f32; range.len()]),
        Init::Normal { .. } | Init::Uniform { .. } => {}
    }
    let key: [u8; 32] = {
        let hash = Sha256::new().chain_update(seed.to_le_bytes()).chain_update(name.as_bytes());
        hash.finalize().into()
    };
    let mut out = vec![0.0; range.len()];
    let cores = std::thread::available_parallelism().map_or(1, NonZero::get);
    let part = range.len().div_ceil(cores).max(PER_THREAD);
    std::thread::scope(|scope| {
        for (i, chunk) in out.chunks_mut(part).enumerate() {
            let from = range.start + i * part;
            let mut fill = move || random(init, key, from, chunk);
            if range.len() <= part {
                fill();
            } else {
                scope.spawn(fill);
            }
        }
    });
    Some(out)
}

/// The elements from `start` on.
fn random(init: &Init, key: [u8; 32], start: usize, out: &mut [f32]) {
    let mut rng = ChaCha12Rng::from_seed(key);
    // Four words make a pair of elements, so that both branches of the transform are used.
    let first_pair = start / 2;
    rng.set_word_pos(first_pair as u128 * 4);
    let mut at = first_pair * 2;
    while at < start + out.len() {
        let (a, b) = (unit(rng.next_u64()), unit(rng.next_u64()));
        let pair = match init {
            Init::Normal { std } => {
                let radius = (-2.0 * (1.0 - a).ln()).sqrt() * std;
                let (sin, cos) = (std::f64::consts::TAU * b).sin_cos();
                [radius * cos, radius * sin]
            }
            Init::Uniform { bound } => [a, b].map(|u| (2.0 * u - 1.0) * bound),
            Init::Weights | Init::Constant(_) => [0.0; 2],
        };
        for (k, value) in pair.into_iter().enumerate() {
            let place = (at + k).checked_sub(start).and_then(|i| out.get_mut(i));
            if let Some(x) = place {
                *x = value as f32;
            }
        }
        at += 2;
    }
}

/// The upper 53 bits as a number in `[0, 1)`.
fn unit(word: u64) -> f64 {
    (word >> 11) as f64 * (1.0 / (1u64 << 53) as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(init: Init, seed: u64, name: &str, range: Range<usize>) -> Vec<f32> {
        values(&init, seed, name, range).unwrap()
    }

    #[test]
    fn a_range_is_a_part_of_the_whole() {
        for init in [Init::Normal { std: 0.5 }, Init::Uniform { bound: 2.0 }, Init::Constant(3.0)] {
            let all = of(init.clone(), 7, "w", 0..101);
            for (a, b) in [(0, 0), (1, 2), (3, 50), (50, 101), (100, 101)] {
                assert_eq!(of(init.clone(), 7, "w", a..b), all[a..b]);
            }
        }
        // Long ranges are made by several threads.
        let (init, n) = (Init::Normal { std: 1.0 }, 2 * PER_THREAD + 3);
        let all = of(init.clone(), 7, "w", 0..n);
        assert_eq!(of(init, 7, "w", PER_THREAD - 2..PER_THREAD + 5), all[PER_THREAD - 2..][..7]);
    }

    #[test]
    fn moments_are_those_asked_for() {
        let n = 100_000;
        let moments = |init| {
            let v = of(init, 0, "w", 0..n);
            let mean = v.iter().map(|x| f64::from(*x)).sum::<f64>() / n as f64;
            let var = v.iter().map(|x| (f64::from(*x) - mean).powi(2)).sum::<f64>() / n as f64;
            (mean, var.sqrt())
        };
        let (mean, std) = moments(Init::Normal { std: 0.02 });
        assert!(mean.abs() < 3e-4 && (std - 0.02).abs() < 3e-4, "{mean} {std}");
        let (mean, std) = moments(Init::Uniform { bound: 1.0 });
        assert!(mean.abs() < 1e-2 && (std - 1.0 / 3f64.sqrt()).abs() < 5e-3, "{mean} {std}");
    }

    #[test]
    fn seed_and_name_matter() {
        let four = |name, seed| of(Init::Normal { std: 1.0 }, seed, name, 0..4);
        assert_ne!(four("a", 0), four("b", 0));
        assert_ne!(four("a", 0), four("a", 1));
        assert_eq!(four("a", 1), four("a", 1));
        assert_eq!(values(&Init::Weights, 0, "a", 0..4), None);
    }
}
