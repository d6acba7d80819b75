"""What is computed by factorizations of matrices, which ONNX has none of: elimination, row after row.

Sizes are those of the program, so that the steps are written out; each is a few operations on all matrices of a batch.
"""

from frit._errors import refuse

#: The most rows of a matrix.
MOST = 64
#: Terms of the series of the exponential, and the most halvings of its argument, whose norm is then at most 1/2.
TERMS, HALVINGS = 10, 11


def operators():
    """Translations, by operator."""
    import torch
    from onnxscript import opset18 as onnx
    from onnxscript.function_libs.torch_lib.tensor_typing import TFloat

    def number(x, of):
        return onnx.CastLike(float(x), of)

    def numbers(*values):
        return onnx.Constant(value_ints=list(values))

    def rows(x, start, end):
        return onnx.Slice(x, numbers(start), numbers(end), numbers(-2))

    def columns(x, start, end):
        return onnx.Slice(x, numbers(start), numbers(end), numbers(-1))

    def turned(x, rank):
        """Each matrix with its axes exchanged."""
        return onnx.Transpose(x, perm=[*range(rank - 2), rank - 1, rank - 2])

    def sizes(a, what):
        """The sizes of a batch of square matrices, and the number of their rows."""
        *batch, _, n = a.shape
        if n > MOST:
            remedy = f"Frit writes out {what} of matrices of up to {MOST} rows: divide them into blocks, or compute it before training"
            raise refuse("E010", f"{what} of {n} x {n} matrices", remedy)
        return batch, n

    def identity(like, batch, n):
        places = onnx.Range(0, n, 1)
        is_one = onnx.Equal(onnx.Unsqueeze(places, numbers(0)), onnx.Unsqueeze(places, numbers(1)))
        return onnx.Expand(onnx.Where(is_one, number(1, like), number(0, like)), numbers(*batch, n, n))

    def eliminated(a, batch, n, width):
        """What Gauss' elimination by the largest pivots leaves of rows of this width: of each its elements from the pivot on, and the
        sign of the permutation."""
        left, rest, sign = [], a, onnx.Expand(number(1, a), numbers(*batch, 1, 1))
        first = onnx.Constant(value_int=0)
        for j in range(n - 1):
            best = onnx.ArgMax(onnx.Abs(columns(rest, 0, 1)), axis=-2, keepdims=1)
            places = onnx.Reshape(onnx.Range(0, n - j, 1), numbers(n - j, 1))
            order = onnx.Where(onnx.Equal(places, best), first, places)
            order = onnx.Where(onnx.Equal(places, first), best, order)
            order = onnx.Expand(order, numbers(*batch, n - j, width - j))
            rest = onnx.GatherElements(rest, order, axis=len(batch))
            sign = onnx.Where(onnx.Equal(best, first), sign, onnx.Neg(sign))
            pivot, below = rows(rest, 0, 1), rows(rest, 1, n - j)
            left.append(pivot)
            factor = onnx.Div(columns(below, 0, 1), columns(pivot, 0, 1))
            rest = onnx.Sub(columns(below, 1, width - j), onnx.Mul(factor, columns(pivot, 1, width - j)))
        return [*left, rest], sign

    def pivots(a, batch, n):
        """The pivots, [..., n], and the sign of the permutation, [...]."""
        left, sign = eliminated(a, batch, n, n)
        found = [columns(row, 0, 1) for row in left]
        found = onnx.Concat(*found, axis=-1) if n > 1 else found[0]
        return onnx.Squeeze(found, numbers(-2)), onnx.Squeeze(sign, numbers(-2, -1))

    def substituted(left, n, width):
        """The solution, given of each row its elements from the diagonal on, and right sides behind them."""
        solved = None
        for j in reversed(range(n)):
            row, own = left[j], n - j
            right = columns(row, own, width - j)
            if solved is not None:
                right = onnx.Sub(right, onnx.MatMul(columns(row, 1, own), solved))
            found = onnx.Div(right, columns(row, 0, 1))
            solved = found if solved is None else onnx.Concat(found, solved, axis=-2)
        return solved

    def solution(a, b, batch, n, width):
        left, _ = eliminated(onnx.Concat(a, b, axis=-1), batch, n, n + width)
        return substituted(left, n, n + width)

    def triangular(a, b, batch, n, width, upper, unit=False):
        """The solution of equations of one triangle of the matrix; the other is not read."""
        if not upper:
            # In reverse order of rows and columns they are of the upper triangle.
            back, rank = numbers(*reversed(range(n))), len(batch) + 2
            a, b = onnx.Gather(onnx.Gather(a, back, axis=rank - 2), back, axis=rank - 1), onnx.Gather(b, back, axis=rank - 2)
            return onnx.Gather(triangular(a, b, batch, n, width, True, unit), back, axis=rank - 2)
        one = onnx.Expand(number(1, a), numbers(*batch, 1, 1))
        left = []
        for j in range(n):
            row = columns(rows(a, j, j + 1), j, n)
            if unit:
                row = onnx.Concat(one, columns(row, 1, n - j), axis=-1) if j + 1 < n else one
            left.append(onnx.Concat(row, rows(b, j, j + 1), axis=-1))
        return substituted(left, n, n + width)

    def broadcast(a, b):
        """Both with the batch of both, given with their sizes; this batch, rows and right sides."""
        (a, (*of_a, n, _)), (b, (*of_b, _, width)) = a, b
        batch = list(torch.broadcast_shapes(tuple(of_a), tuple(of_b)))
        return onnx.Expand(a, numbers(*batch, n, n)), onnx.Expand(b, numbers(*batch, n, width)), batch, n, width

    def with_turned(x):
        """A matrix with its axes exchanged, and its sizes."""
        *batch, m, n = x.shape
        return turned(x, len(x.shape)), [*batch, n, m]

    def with_sizes(x):
        return x, list(x.shape)

    def det(A: TFloat):
        batch, n = sizes(A, "the determinant")
        if n <= 3:
            return onnx.Det(A)
        found, sign = pivots(A, batch, n)
        return onnx.Mul(onnx.ReduceProd(found, numbers(-1), keepdims=0), sign)

    def slogdet(A: TFloat):
        found, sign = pivots(A, *sizes(A, "the determinant"))
        sign = onnx.Mul(onnx.ReduceProd(onnx.Sign(found), numbers(-1), keepdims=0), sign)
        return sign, onnx.ReduceSum(onnx.Log(onnx.Abs(found)), numbers(-1), keepdims=0)

    def logdet(A: TFloat):
        sign, size = slogdet(A)
        # Not a number where the determinant is negative.
        return onnx.Add(size, onnx.Log(sign))

    def inverse(A: TFloat, check_errors: bool = False):
        batch, n = sizes(A, "the inverse")
        return solution(A, identity(A, batch, n), batch, n, n), onnx.Constant(value_int=0)

    def solve(A: TFloat, B: TFloat, left: bool = True, check_errors: bool = False):
        sizes(A, "the solution")
        of_a, of_b = list(A.shape), list(B.shape)
        if len(of_b) == 1 or of_b == of_a[:-1]:
            b = onnx.Unsqueeze(B, numbers(-1)), [*of_b, 1]
            found = onnx.Squeeze(solution(*broadcast(with_sizes(A) if left else with_turned(A), b)), numbers(-1))
        elif left:
            found = solution(*broadcast(with_sizes(A), with_sizes(B)))
        else:
            found = turned(solution(*broadcast(with_turned(A), with_turned(B))), max(len(of_a), len(of_b)))
        return found, onnx.Constant(value_int=0)

    def solve_triangular(A: TFloat, B: TFloat, upper: bool, left: bool = True, unitriangular: bool = False):
        sizes(A, "the solution")
        if left:
            return triangular(*broadcast(with_sizes(A), with_sizes(B)), upper, unitriangular)
        found = triangular(*broadcast(with_turned(A), with_turned(B)), not upper, unitriangular)
        return turned(found, max(len(A.shape), len(B.shape)))

    def cholesky(A: TFloat, upper: bool = False, check_errors: bool = False):
        batch, n = sizes(A, "the Cholesky factor")
        rank = len(batch) + 2
        # The gradient of both triangles is that of their mean.
        rest = onnx.Mul(onnx.Add(A, turned(A, rank)), number(0.5, A))
        found = []
        for j in range(n):
            own = onnx.Div(columns(rest, 0, 1), onnx.Sqrt(columns(rows(rest, 0, 1), 0, 1)))
            above = [0] * (2 * rank)
            above[rank - 2] = j
            found.append(onnx.Pad(own, numbers(*above)) if j > 0 else own)
            if j + 1 < n:
                below = rows(own, 1, n - j)
                rest = columns(rows(rest, 1, n - j), 1, n - j)
                rest = onnx.Sub(rest, onnx.Mul(below, turned(below, rank)))
        lower = onnx.Concat(*found, axis=-1) if n > 1 else found[0]
        return turned(lower, rank) if upper else lower, onnx.Constant(value_int=0)

    def by_factor(lower, b, batch, n, width):
        """The solution of L Lᵀ x = b."""
        half = triangular(lower, b, batch, n, width, False)
        return triangular(turned(lower, len(batch) + 2), half, batch, n, width, True)

    def cholesky_solve(B: TFloat, A: TFloat, upper: bool = False):
        sizes(A, "the solution")
        return by_factor(*broadcast(with_turned(A) if upper else with_sizes(A), with_sizes(B)))

    def cholesky_inverse(A: TFloat, upper: bool = False):
        batch, n = sizes(A, "the inverse")
        lower = turned(A, len(batch) + 2) if upper else A
        return by_factor(lower, identity(A, batch, n), batch, n, n)

    def exponential(A: TFloat):
        batch, n = sizes(A, "the exponential")
        norm = onnx.ReduceSum(onnx.Abs(A), numbers(-1), keepdims=1)
        norm = onnx.ReduceMax(norm, numbers(-2), keepdims=1)
        scale, is_halved = number(1, A), []
        for k in range(HALVINGS):
            # Whether it is halved once more; no gradient passes by a comparison.
            is_halved.append(onnx.Greater(norm, number(2.0 ** (k - 1), A)))
            scale = onnx.Where(is_halved[k], number(0.5 ** (k + 1), A), scale)
        x, one = onnx.Mul(A, scale), identity(A, batch, n)
        total = one
        for k in range(TERMS, 0, -1):
            total = onnx.Add(one, onnx.Mul(onnx.MatMul(x, total), number(1 / k, A)))
        for halved in is_halved:
            total = onnx.Where(halved, onnx.MatMul(total, total), total)
        return total

    aten = torch.ops.aten
    return {
        aten.cholesky_inverse.default: cholesky_inverse,
        aten.cholesky_solve.default: cholesky_solve,
        aten.det.default: det,
        aten.linalg_cholesky_ex.default: cholesky,
        aten.linalg_det.default: det,
        aten.linalg_inv_ex.default: inverse,
        aten.linalg_matrix_exp.default: exponential,
        aten.linalg_slogdet.default: slogdet,
        aten.linalg_solve_ex.default: solve,
        aten.linalg_solve_triangular.default: solve_triangular,
        aten.logdet.default: logdet,
        aten.matrix_exp.default: exponential,
        aten.slogdet.default: slogdet,
    }


def checks(torch):
    """Operators that check data after they have computed, which is a condition, by those that do not."""
    aten = torch.ops.aten
    return {
        aten.inverse.default: aten.linalg_inv_ex.default,
        aten.linalg_cholesky.default: aten.linalg_cholesky_ex.default,
        aten.linalg_inv.default: aten.linalg_inv_ex.default,
        aten.linalg_solve.default: aten.linalg_solve_ex.default,
    }
