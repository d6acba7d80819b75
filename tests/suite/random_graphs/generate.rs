//! Random well-typed forward graphs over all families of operations, as JSON models.

use frit_ir::{DType, Op, TensorType};
use serde_json::{Map, Value, json};

/// Examples of a micro-batch.
pub(super) const BATCH: usize = 2;
/// Rows of every table that indices look up.
pub(super) const ROWS: usize = 5;
/// The input that all numbers of the random generator's state are.
pub(super) const DRAWS: &str = "draws";
/// Most elements of a value.
const MAX_ELEMENTS: usize = 512;
/// Attempts to add an operation.
const ATTEMPTS: usize = 14;

/// Choices that follow from a seed.
pub(super) struct Random(fastrand::Rng);

impl Random {
    pub(super) fn new(seed: u64) -> Random {
        Random(fastrand::Rng::with_seed(seed))
    }

    /// An integer below `n`.
    pub(super) fn below(&mut self, n: usize) -> usize {
        self.0.usize(..n)
    }

    pub(super) fn flag(&mut self) -> bool {
        self.0.bool()
    }

    pub(super) fn pick<'a, T: ?Sized>(&mut self, from: &[&'a T]) -> &'a T {
        from[self.below(from.len())]
    }

    /// A number between −1 and 1.
    pub(super) fn number(&mut self) -> f32 {
        2.0 * self.0.f32() - 1.0
    }
}

/// A value of the model.
#[derive(Clone)]
struct Named {
    name: String,
    ty: TensorType,
}

impl Named {
    fn dims(&self) -> &[usize] {
        self.ty.shape.dims()
    }
}

/// A model that grows.
pub(super) struct Generator {
    random: Random,
    /// f32 values that depend on data or parameters.
    floats: Vec<Named>,
    params: Vec<Value>,
    nodes: Vec<Value>,
    n_names: usize,
    /// What masks are drawn from.
    draws: Named,
}

/// A model and the output that its loss reads.
pub(crate) struct Generated {
    pub(crate) json: String,
    pub(super) output: String,
}

const UNARY: [&str; 12] = [
    "tanh", "relu", "neg", "abs", "sigmoid", "gelu", "silu", "softplus", "erf", "sin", "cos", "exp",
];
const BINARY: [&str; 5] = ["add", "sub", "mul", "max", "min"];

/// The model of a seed.
pub(crate) fn generate(seed: u64) -> Generated {
    let mut g = Generator {
        random: Random::new(seed),
        floats: vec![],
        params: vec![],
        nodes: vec![],
        n_names: 0,
        draws: Named { name: DRAWS.into(), ty: TensorType::scalar(DType::I64) },
    };
    let shape: &[usize] =
        g.random.pick(&[&[BATCH, 4][..], &[BATCH, 3, 4], &[BATCH, 2, 4, 4], &[BATCH, 8, 16]]);
    let x = Named { name: "x".into(), ty: TensorType::new(DType::F32, shape) };
    let ids = Named { name: "ids".into(), ty: TensorType::new(DType::I64, [BATCH, 3]) };
    g.floats.push(x.clone());
    // Whatever comes, a parameter reaches the loss.
    let scale = g.param(&shape[shape.len() - 1..]);
    g.add("mul", json!({}), &[&x, &scale]);
    if g.random.flag() {
        let table = g.param(&[ROWS, 4]);
        g.add("embedding", json!({}), &[&table, &ids]);
    }
    for _ in 0..ATTEMPTS {
        let of = g.random.below(g.floats.len().min(4)) + 1;
        let x = g.floats[g.floats.len() - of].clone();
        g.grow(&x);
    }
    let last = g.floats[g.floats.len() - 1].clone();
    // Everything is used: what is left over is added to the output.
    let mut output = g.add("tanh", json!({}), &[&last]).expect("fits")[0].clone();
    for value in g.floats.clone().iter().rev().skip(2).take(2) {
        let axes: Vec<usize> = (0..value.dims().len()).collect();
        let attributes = json!({"f": "mean", "axes": axes, "keep_dims": false});
        if let Some(mean) = g.add("reduce", attributes, &[value])
            && let Some(sum) = g.add("add", json!({}), &[&output, &mean[0]])
        {
            output = sum[0].clone();
        }
    }
    // Labels have an example for each of the data.
    let n = output.ty.shape.numel();
    for (op, shape) in [("reshape", vec![n]), ("expand", vec![BATCH, n])] {
        let made = g.add(op, json!({"shape": shape}), &[&output]);
        output = made.expect("fits")[0].clone();
    }
    let input =
        |v: &Named| json!({"name": v.name, "dtype": v.ty.dtype.name(), "shape": v.ty.shape.dims()});
    let reads = |name: &str| {
        g.nodes.iter().any(|n| n["inputs"].as_array().is_some_and(|i| i.iter().any(|i| i == name)))
    };
    let inputs =
        [&x, &ids, &g.draws].into_iter().filter(|v| reads(&v.name)).map(input).collect::<Vec<_>>();
    let json = json!({
        "frit_model": 1, "name": format!("random {seed}"), "inputs": inputs, "params": g.params,
        "nodes": g.nodes, "outputs": [output.name],
    });
    Generated { json: format!("{json:#}"), output: output.name }
}

impl Generator {
    fn name(&mut self, of: &str) -> String {
        self.n_names += 1;
        format!("{of}{}", self.n_names)
    }

    fn param(&mut self, shape: &[usize]) -> Named {
        let name = self.name("w");
        let init = json!({"uniform": {"bound": 0.8}});
        self.params.push(json!({"name": name, "shape": shape, "init": init}));
        Named { name, ty: TensorType::new(DType::F32, shape) }
    }

    /// Draws a mask of this shape.
    fn random_mask(&mut self, shape: &[usize]) -> Option<Named> {
        let mask = json!({"shape": shape, "keep": 0.75, "id": self.n_names});
        let draws = self.draws.clone();
        let state = self.add("expand", json!({"shape": [5]}), &[&draws])?;
        self.add("random_mask", mask, &[&state[0]])?.pop()
    }

    /// Adds a node, if its operands fit; what it makes.
    fn add(&mut self, op: &str, attributes: Value, inputs: &[&Named]) -> Option<Vec<Named>> {
        let attributes: Map<String, Value> = attributes.as_object().cloned()?;
        let types: Vec<&TensorType> = inputs.iter().map(|v| &v.ty).collect();
        let results = Op::from_parts(op, attributes.clone()).ok()?.infer(&types).ok()?;
        let most = if op == "expand" { MAX_ELEMENTS } else { MAX_ELEMENTS / 2 };
        let small =
            |ty: &TensorType| (1..=most).contains(&ty.shape.numel()) && ty.shape.rank() <= 5;
        if !results.iter().all(small) {
            return None;
        }
        let made: Vec<Named> =
            results.into_iter().map(|ty| Named { name: self.name("v"), ty }).collect();
        let names = |values: &[&Named]| values.iter().map(|v| v.name.clone()).collect::<Vec<_>>();
        self.nodes.push(json!({
            "op": op, "attrs": attributes, "inputs": names(inputs),
            "outputs": names(&made.iter().collect::<Vec<_>>()),
        }));
        // Statistics have no gradient.
        let read = if op == "split" { made.len() } else { 1 };
        let floats = made.iter().take(read).filter(|v| v.ty.dtype == DType::F32);
        self.floats.extend(floats.cloned());
        Some(made)
    }

    /// Tries to add an operation of some family that reads `x`.
    fn grow(&mut self, x: &Named) {
        let dims = x.dims().to_vec();
        let rank = dims.len();
        let axis = if rank > 0 { self.random.below(rank) } else { 0 };
        match self.random.below(20) {
            0 | 1 => {
                let op = self.random.pick(&UNARY);
                // What grows fast is kept small.
                let x = match op {
                    "exp" => self.add("tanh", json!({}), &[x]).map(|v| v[0].clone()),
                    _ => Some(x.clone()),
                };
                x.and_then(|x| self.add(op, json!({}), &[&x]));
            }
            2 => {
                let from = self.random.below(rank + 1);
                let shape: Vec<usize> =
                    dims[from..].iter().map(|n| if self.random.flag() { 1 } else { *n }).collect();
                let (op, w) = (self.random.pick(&BINARY), self.param(&shape));
                self.add(op, json!({}), &[x, &w]);
            }
            3 => {
                let other = self.random.below(self.floats.len());
                let (op, other) = (self.random.pick(&BINARY), self.floats[other].clone());
                self.add(op, json!({}), &[x, &other]);
            }
            4 | 5 if rank > 0 => {
                // Multiples of 16 are multiplied as 8-bit floats.
                let width = if self.random.flag() { 16 } else { 1 + self.random.below(8) };
                let transposed = self.random.flag();
                let inner = dims[rank - 1];
                let shape = if transposed { [width, inner] } else { [inner, width] };
                let w = self.param(&shape);
                self.add("matmul", json!({"trans_a": false, "trans_b": transposed}), &[x, &w]);
            }
            6 => {
                let op = self.random.pick(&["softmax", "log_softmax"]);
                self.add(op, json!({"axis": axis}), &[x]);
            }
            7 if rank > 0 => {
                let (scale, bias) = (self.param(&dims[axis..]), self.param(&dims[axis..]));
                let attributes = json!({"axis": axis, "eps": 1e-2});
                match self.random.flag() {
                    true => self.add("layer_norm", attributes, &[x, &scale, &bias]),
                    false => self.add("rms_norm", attributes, &[x, &scale]),
                };
            }
            8 if rank > 1 => {
                let (scale, bias) = (self.param(&dims[1..2]), self.param(&dims[1..2]));
                self.add("batch_norm", json!({"eps": 1e-1}), &[x, &scale, &bias]);
            }
            9 if rank > 1 => {
                let f = self.random.pick(&["sum", "mean", "max", "min"]);
                let keep = self.random.flag();
                self.add("reduce", json!({"f": f, "axes": [axis], "keep_dims": keep}), &[x]);
            }
            10 => {
                let mut perm: Vec<usize> = (0..rank).collect();
                (1..rank).for_each(|i| perm.swap(i, self.random.below(i + 1)));
                self.add("transpose", json!({"perm": perm}), &[x]);
            }
            11 => {
                let n: usize = dims.iter().product();
                let first = self.random.below(n) + 1;
                let shape = if n.is_multiple_of(first) { vec![first, n / first] } else { vec![n] };
                self.add("reshape", json!({"shape": shape}), &[x]);
            }
            12 if x.ty.shape.numel() <= MAX_ELEMENTS / 4 => {
                let shape = [&[2], &dims[..]].concat();
                self.add("expand", json!({"shape": shape}), &[x]);
            }
            13 if rank > 0 => {
                let halves = [dims[axis] / 2, dims[axis] - dims[axis] / 2];
                match self.random.below(4) {
                    0 => self.add("concat", json!({"axis": axis}), &[x, x]),
                    1 => self.add("split", json!({"axis": axis, "sizes": halves}), &[x]),
                    2 => {
                        let (mut low, high) = (vec![0; rank], vec![1; rank]);
                        low[axis] = 2;
                        self.add("pad", json!({"low": low, "high": high, "value": 0.5}), &[x])
                    }
                    _ => {
                        let (mut start, mut step) = (vec![0; rank], vec![1; rank]);
                        (start[axis], step[axis]) = (dims[axis] - 1, -1);
                        self.add("slice", json!({"start": start, "size": dims, "step": step}), &[x])
                    }
                };
            }
            14 if rank > 0 => {
                let ids: Vec<usize> = (0..3).map(|_| self.random.below(dims[axis])).collect();
                let ty = json!({"dtype": "i64", "shape": [3]});
                let ids = self.add("constant", json!({"ty": ty, "values": ids}), &[]);
                ids.and_then(|ids| self.add("gather", json!({"axis": axis}), &[x, &ids[0]]));
            }
            15 => {
                let w = self.param(&dims[rank.min(1)..]);
                if let Some(c) = self.add("gt", json!({}), &[x, &w]) {
                    self.add("select", json!({}), &[&c[0], x, &w]);
                }
            }
            16 if rank > 2 => {
                let spatial = rank - 2;
                let ones = vec![1; spatial];
                let window = json!({"strides": ones, "dilations": ones, "low": ones, "high": ones});
                let taps = vec![2; spatial];
                match self.random.below(3) {
                    0 => {
                        let w = self.param(&[&[3, dims[1]], &taps[..]].concat());
                        self.add("conv", json!({"window": window, "groups": 1}), &[x, &w])
                    }
                    1 => self.add("max_pool", json!({"window": window, "taps": taps}), &[x]),
                    _ => self.add("sum_pool", json!({"window": window, "taps": taps}), &[x]),
                };
            }
            17 if rank == 4 => {
                let w = self.param(&dims[3..]);
                let keys = self.add("mul", json!({}), &[x, &w]);
                let causal = self.random.flag();
                let mut attributes = json!({"scale": 0.5, "causal": causal});
                let scores = [&dims[..3], &dims[2..3]].concat();
                let kept = if self.random.flag() { self.random_mask(&scores) } else { None };
                if let Some(k) = keys {
                    let mut operands = vec![x, &k[0], x];
                    if let Some(kept) = &kept {
                        attributes["keep"] = json!(0.75);
                        operands.push(kept);
                    }
                    self.add("attention", attributes, &operands);
                }
            }
            18 => {
                let kept = self.random_mask(&dims);
                let ty = json!({"dtype": "f32", "shape": []});
                let zero = self.add("constant", json!({"ty": ty, "splat": 0.0}), &[]);
                if let (Some(kept), Some(zero)) = (kept, zero) {
                    self.add("select", json!({}), &[&kept, x, &zero[0]]);
                }
            }
            _ => {
                let attributes = json!({"axis": axis, "exclusive": false, "reverse": true});
                self.add("cum_sum", attributes, &[x]);
            }
        }
    }
}
