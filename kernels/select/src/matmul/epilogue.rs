//! GEMMs with cuBLASLt epilogues beyond a bias (GELU, its gradient, bias gradients), and without them and with generated
//! kernels behind, and GEMMs that quantize their operands to 8-bit floats, with any of these epilogues or a bias.
//!
//! cuBLASLt's GELU is the tanh form. Additional operands and results of an epilogue have the result's dtype, and rows
//! of a multiple of eight elements. A row sum has the result's dtype, so an f32 bias gradient is fused with an f32
//! weight gradient. An 8-bit GEMM cannot add an f32 bias. Source: cuBLASLt, `cublasLtEpilogue_t`,
//! `CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD`.

use crate::assembler::Assembler;
use crate::generated::Generated;
use crate::matmul::{biased, is_direct, matrix, with_epilogue};
use crate::quantize;
use frit_ir::ops::{BinaryFn, FusionKind, MatMul, UnaryFn};
use frit_ir::plan::{Epilogue, Gemm, Launch, Matrix, Pointer};
use frit_ir::{DType, Graph, Node, Op, TensorType, ValueId};

/// Row lengths of the additional operands and results of an epilogue are multiples of this.
const ROW_ALIGNMENT: usize = 8;

/// The nodes of a body with one matmul.
struct Parts<'a> {
    body: &'a Graph,
    matmul: &'a Node,
    op: &'a MatMul,
    /// Those that quantize its operands, if any.
    rounded: Vec<&'a Node>,
    /// The others, without reshapes.
    rest: Vec<&'a Node>,
}

/// The launches of a body that is a GEMM with such an epilogue; `None` if it is not.
pub(crate) fn cuda(a: &mut Assembler<'_>, body: &Graph) -> Option<()> {
    let is_work = |n: &&Node| !n.op.is_leaf() && !matches!(n.op, Op::Reshape(_));
    let nodes: Vec<&Node> = body.nodes().map(|(_, n)| n).filter(is_work).collect();
    let (matmuls, rest): (Vec<&Node>, Vec<&Node>) =
        nodes.into_iter().partition(|n| matches!(n.op, Op::MatMul(_)));
    let (rounded, rest): (Vec<&Node>, Vec<&Node>) =
        rest.into_iter().partition(|n| matches!(n.op, Op::Quantize(_)));
    let [matmul] = matmuls[..] else { return None };
    let Op::MatMul(op) = &matmul.op else { return None };
    let parts = Parts { body, matmul, op, rounded, rest };
    let ops: Vec<&Op> = parts.rest.iter().map(|n| &n.op).collect();
    match ops[..] {
        [] => parts.rounded(a, None),
        [Op::Binary(BinaryFn::Add)] if parts.rounded.is_empty() => {
            parts.sum_with_matrix(a, None, parts.rest[0])
        }
        [Op::Binary(BinaryFn::Add)] => parts.rounded(a, Some(parts.rest[0])),
        [Op::Binary(BinaryFn::Add), Op::Binary(BinaryFn::Add)] => {
            parts.sum_with_matrix(a, Some(parts.rest[0]), parts.rest[1])
        }
        [Op::Unary(UnaryFn::GeluTanh)] => parts.gelu(a, None, parts.rest[0]),
        [Op::Binary(BinaryFn::Add), Op::Unary(UnaryFn::GeluTanh)] => {
            parts.gelu(a, Some(parts.rest[0]), parts.rest[1])
        }
        [Op::Binary(BinaryFn::GeluTanhGrad)] => parts.gelu_grad(a, parts.rest[0], None),
        [Op::Binary(BinaryFn::GeluTanhGrad), Op::SumTo(_)] => {
            parts.gelu_grad(a, parts.rest[0], Some(parts.rest[1]))
        }
        [Op::SumTo(_)] => parts.sum(a, parts.rest[0]),
        _ => None,
    }
}

impl Parts<'_> {
    /// The value of which `v` is a reshape, through any number of them.
    fn base(&self, mut v: ValueId) -> ValueId {
        while let Op::Reshape(_) = self.body.def(v).op {
            v = self.body.def(v).inputs[0];
        }
        v
    }

    /// The other operand of a node that has two and reads `value`.
    fn other(&self, node: &Node, value: ValueId) -> Option<ValueId> {
        let [a, b] = node.inputs[..] else { return None };
        match (self.base(a) == value, self.base(b) == value) {
            (true, false) => Some(b),
            (false, true) => Some(a),
            _ => None,
        }
    }

    fn is_output(&self, v: ValueId) -> bool {
        self.body.outputs.iter().any(|o| o.value == v)
    }

    /// The GEMM written to `d`, without an epilogue; `None` if it is a batch, or empty.
    fn gemm(&self, a: &mut Assembler<'_>, d: Pointer, d_type: DType) -> Option<Gemm> {
        let inputs = [0, 1].map(|i| self.matmul.inputs[i]);
        let [left, right] = inputs.map(|v| self.body.ty(v));
        let dims = self.op.dims(left, right);
        let floats = matches!(left.dtype, DType::F32 | DType::F16 | DType::BF16);
        if !floats || dims.batch != 1 || dims.m * dims.n * dims.k == 0 {
            return None;
        }
        let (m, n, k) = (dims.m, dims.n, dims.k);
        let [in_a, in_b] = if self.rounded.is_empty() {
            let [from_a, from_b] = inputs.map(|v| a.read(self.base(v)));
            [
                matrix(from_a?, left.dtype, (m, k), self.op.trans_a),
                matrix(from_b?, right.dtype, (k, n), self.op.trans_b),
            ]
        } else {
            self.codes(a, [m, n, k])?
        };
        let d = matrix(d, d_type, (m, n), false);
        Some(Gemm { m, n, k, batch: 1, a: in_a, b: in_b, d, epilogue: Epilogue::None })
    }

    /// Both operands as 8-bit floats, their contracted axis last.
    fn codes(&self, a: &mut Assembler<'_>, [m, n, k]: [usize; 3]) -> Option<[Matrix; 2]> {
        let nodes = [0, 1].map(|i| self.body.def(self.base(self.matmul.inputs[i])));
        let to = |node: &Node| if let Op::Quantize(op) = &node.op { Some(op.to) } else { None };
        if to(nodes[0])? == DType::F8E5M2 && to(nodes[1])? == DType::F8E5M2 {
            return None;
        }
        let (turn_a, turn_b) = (self.op.trans_a, !self.op.trans_b);
        let shapes = [if turn_a { [k, m] } else { [m, k] }, if turn_b { [k, n] } else { [n, k] }];
        let mut latest = |node: &Node, again: bool| {
            let amax = node.outputs[1];
            (self.is_output(amax) && !again).then(|| a.write(amax))
        };
        let same = nodes[0].outputs == nodes[1].outputs;
        let latest = [latest(nodes[0], false), latest(nodes[1], same)];
        let in_a = quantize::codes(a, nodes[0], shapes[0], turn_a, latest[0])?;
        let in_b = quantize::codes(a, nodes[1], shapes[1], turn_b, latest[1])?;
        Some([in_a, Matrix { transposed: true, ..in_b }])
    }

    /// The GEMM of 8-bit floats, and a bias that is added to it.
    fn rounded(&self, a: &mut Assembler<'_>, add: Option<&Node>) -> Option<()> {
        let matmul = self.matmul.outputs[0];
        let ty = self.body.ty(matmul);
        if self.rounded.is_empty() || !is_direct(DType::BF16, ty.dtype) && ty.dtype != DType::F16 {
            return None;
        }
        let Some(add) = add else {
            let d = a.write(matmul);
            let plain = self.gemm(a, d, ty.dtype)?;
            a.launch(Launch::Gemm(plain));
            return Some(());
        };
        let epilogue = Epilogue::Bias(self.bias(a, add)?);
        let d = a.write(add.outputs[0]);
        let plain = self.gemm(a, d, ty.dtype)?;
        biased(a, &Gemm { epilogue, ..plain }, (d, ty.dtype))
    }

    /// The vector that a node adds to the matmul, provided that nothing else reads the matmul.
    fn bias(&self, a: &mut Assembler<'_>, add: &Node) -> Option<Pointer> {
        let matmul = self.matmul.outputs[0];
        let (ty, bias) = (self.body.ty(matmul), self.other(add, matmul)?);
        let n = *ty.shape.0.last()?;
        let fits = is_vector(self.body.ty(bias), n)
            && !self.is_output(matmul)
            && self.body.ty(add.outputs[0]).shape.numel() == ty.shape.numel()
            && (self.rounded.is_empty() || ty.dtype != DType::F32);
        a.read(fits.then(|| self.base(bias))?)
    }

    /// The sum of the matmul, and of a bias, with a matrix of its size.
    fn sum_with_matrix(
        &self,
        a: &mut Assembler<'_>,
        bias: Option<&Node>,
        add: &Node,
    ) -> Option<()> {
        let matmul = self.matmul.outputs[0];
        let ty = self.body.ty(matmul);
        let (sum, bias) = match bias {
            None => (matmul, None),
            Some(add) => (add.outputs[0], Some(self.bias(a, add)?)),
        };
        let other = self.other(add, sum)?;
        let like = |v: ValueId| {
            let other = self.body.ty(v);
            other.dtype == ty.dtype && other.shape.numel() == ty.shape.numel()
        };
        let fits = like(other)
            && like(add.outputs[0])
            && self.base(other) != matmul
            && !self.is_output(sum)
            && !self.is_output(matmul)
            && is_direct(self.body.ty(self.matmul.inputs[0]).dtype, ty.dtype)
            && self.rounded.is_empty();
        let matrix = a.read(fits.then(|| self.base(other))?)?;
        let d = a.write(add.outputs[0]);
        let plain = self.gemm(a, d, ty.dtype)?;
        let gemm = Gemm { epilogue: Epilogue::Add { matrix, bias }, ..plain };
        if bias.is_some() {
            return biased(a, &gemm, (d, ty.dtype));
        }
        a.launch(Launch::Gemm(gemm));
        Some(())
    }

    /// GELU of the matmul, or of its sum with a bias.
    fn gelu(&self, a: &mut Assembler<'_>, add: Option<&Node>, gelu: &Node) -> Option<()> {
        let matmul = self.matmul.outputs[0];
        let ty = self.body.ty(matmul);
        let n = *ty.shape.0.last()?;
        let (sum, bias) = match add {
            None => (matmul, None),
            Some(add) => (add.outputs[0], Some(self.bias(a, add)?)),
        };
        let fits = self.base(gelu.inputs[0]) == sum
            && ty.dtype == self.body.ty(self.matmul.inputs[0]).dtype
            && n.is_multiple_of(ROW_ALIGNMENT);
        fits.then_some(())?;
        let before = self.is_output(sum).then(|| a.write(sum));
        let d = a.write(gelu.outputs[0]);
        let plain = self.gemm(a, d, ty.dtype)?;
        let at = before.unwrap_or(d);
        let mut kernel = Generated::new();
        let mut x = kernel.read(at, ty.dtype, &[plain.m, n])?;
        if let Some(bias) = bias {
            let bias = kernel.read(bias, ty.dtype, &[n])?;
            x = kernel.binary(BinaryFn::Add, x, bias)?;
            before.into_iter().for_each(|before| kernel.write(x, before));
        }
        let y = kernel.unary(UnaryFn::GeluTanh, x)?;
        kernel.write(y, d);
        let matmul = Gemm { d: Matrix { at, ..plain.d.clone() }, ..plain.clone() };
        let unfused = vec![Launch::Gemm(matmul), kernel.launch(a, FusionKind::Pointwise)];
        let epilogue = Epilogue::Gelu { bias, before };
        a.launch(with_epilogue(vec![Launch::Gemm(Gemm { epilogue, ..plain })], unfused));
        Some(())
    }

    /// The matmul times the derivative of GELU, and the sum of its rows.
    fn gelu_grad(&self, a: &mut Assembler<'_>, grad: &Node, sum: Option<&Node>) -> Option<()> {
        let matmul = self.matmul.outputs[0];
        let ty = self.body.ty(matmul);
        let (n, numel) = (*ty.shape.0.last()?, ty.shape.numel());
        let before = grad.inputs[1];
        let like = |v: ValueId| self.body.ty(v).shape.numel() == numel;
        let fits = self.base(grad.inputs[0]) == matmul
            && !self.is_output(matmul)
            && self.base(before) != matmul
            && like(before)
            && like(grad.outputs[0])
            && ty.dtype == self.body.ty(self.matmul.inputs[0]).dtype
            && n.is_multiple_of(ROW_ALIGNMENT);
        fits.then_some(())?;
        let before = a.read(self.base(before))?;
        let result = grad.outputs[0];
        let d = a.write(result);
        let rows = match sum {
            None => None,
            Some(sum) => {
                let to = self.body.ty(sum.outputs[0]);
                let fits = self.base(sum.inputs[0]) == result
                    && self.body.ty(sum.inputs[0]).shape.0.last() == Some(&n)
                    && is_vector(to, n)
                    && to.dtype == ty.dtype;
                Some(a.write(fits.then_some(sum.outputs[0])?))
            }
        };
        let plain = self.gemm(a, d, ty.dtype)?;
        let mut kernel = Generated::new();
        let g = kernel.read(d, ty.dtype, &[plain.m, n])?;
        let x = kernel.read(before, ty.dtype, &[plain.m, n])?;
        let y = kernel.binary(BinaryFn::GeluTanhGrad, g, x)?;
        kernel.write(y, d);
        let mut unfused = vec![Launch::Gemm(plain.clone())];
        unfused.push(kernel.launch(a, FusionKind::Pointwise));
        if let Some(rows) = rows {
            unfused.push(sum_of_rows(a, (rows, ty.dtype), (d, ty.dtype), [plain.m, n])?);
        }
        let epilogue = Epilogue::GeluGrad { before, rows };
        a.launch(with_epilogue(vec![Launch::Gemm(Gemm { epilogue, ..plain })], unfused));
        Some(())
    }

    /// The matmul, and the sum of an operand over the contracted axis.
    fn sum(&self, a: &mut Assembler<'_>, sum: &Node) -> Option<()> {
        let ty = self.body.ty(self.matmul.outputs[0]);
        let dtype = self.body.ty(self.matmul.inputs[0]).dtype;
        let to = self.body.ty(sum.outputs[0]);
        if !is_direct(dtype, ty.dtype) || to.dtype != ty.dtype || !self.rounded.is_empty() {
            return None;
        }
        let summed = self.base(sum.inputs[0]);
        let [of_a, of_b] = [0, 1].map(|i| self.base(self.matmul.inputs[i]) == summed);
        let d = a.write(self.matmul.outputs[0]);
        let rows = a.write(sum.outputs[0]);
        let plain = self.gemm(a, d, ty.dtype)?;
        let last = *self.body.ty(sum.inputs[0]).shape.0.last()?;
        let (epilogue, from, size) = if of_b && !plain.b.transposed && last == plain.n {
            (Epilogue::SumB(rows), plain.b.at, plain.n)
        } else if of_a && plain.a.transposed && last == plain.m {
            (Epilogue::SumA(rows), plain.a.at, plain.m)
        } else {
            return None;
        };
        if !is_vector(to, size) {
            return None;
        }
        let sums = sum_of_rows(a, (rows, to.dtype), (from, dtype), [plain.k, size])?;
        let unfused = vec![Launch::Gemm(plain.clone()), sums];
        a.launch(with_epilogue(vec![Launch::Gemm(Gemm { epilogue, ..plain })], unfused));
        Some(())
    }
}

/// Whether all elements, this many, lie along the last axis.
fn is_vector(ty: &TensorType, n: usize) -> bool {
    ty.shape.0.last() == Some(&n) && ty.shape.numel() == n
}

/// The launch that sums the rows of a contiguous matrix.
fn sum_of_rows(
    a: &mut Assembler<'_>,
    to: (Pointer, DType),
    from: (Pointer, DType),
    shape: [usize; 2],
) -> Option<Launch> {
    let mut kernel = Generated::new();
    let x = kernel.read(from.0, from.1, &shape)?;
    let sums = kernel.sum_columns(x, to.1)?;
    kernel.write(sums, to.0);
    Some(kernel.launch(a, FusionKind::ColReduce))
}
