//! What holds of the objectives whatever the numbers, and numbers worked out by hand.

mod common;

use common::assert_close;
use gradprism::objective::{
    AdaptiveKl, AdvantageEstimator, Aggregation, Algorithm, GRPO_EPSILON, GroupIndex,
    ImportanceCorrection, ImportanceLevel, KlEstimator, KlGradient, KlPenalty, OverlongPenalty,
    Preset, Rewards, Surrogate, SurrogateForm, TokenWeights, Tokens, discounted_returns, entropy,
    gae, gather, log_probs, logit_gradient, mean_kl, on_last_token, require_rewards,
    rewards_with_kl, value_loss, whiten,
};
use proptest::prelude::*;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use tch::{Kind, Tensor};

const FORMS: [SurrogateForm; 3] =
    [SurrogateForm::PpoClip, SurrogateForm::Cispo, SurrogateForm::Gspo];
const AGGREGATIONS: [Aggregation; 4] = [
    Aggregation::TokenMean,
    Aggregation::SeqMeanTokenMean,
    Aggregation::SeqMeanTokenSum,
    Aggregation::SeqMeanTokenSumNorm,
];
const ESTIMATORS: [KlEstimator; 4] =
    [KlEstimator::K1, KlEstimator::K2, KlEstimator::K3, KlEstimator::Abs];

/// Tokens of a batch of random shape, with observation tokens and padding in the mask.
fn tokens(seed: u64) -> Tokens {
    common::one_thread();
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let (rows, columns) = (random.random_range(1..7_i64), random.random_range(1..9_i64));
    let count = (rows * columns) as usize;
    let mut numbers = |low: f64, high: f64| -> Tensor {
        let numbers: Vec<f64> = (0..count).map(|_| random.random_range(low..high)).collect();
        Tensor::from_slice(&numbers).reshape([rows, columns])
    };
    let logp = numbers(-4.0, -0.1);
    let tokens = Tokens {
        old_logp: &logp + numbers(-0.5, 0.5),
        ref_logp: Some(&logp + numbers(-0.5, 0.5)),
        sampler_logp: Some(&logp + numbers(-0.5, 0.5)),
        advantages: numbers(-2.0, 2.0),
        mask: numbers(0.0, 1.0).lt(0.7),
        logp,
    };
    tokens.masked().unwrap()
}

fn algorithm(form: SurrogateForm, estimator: KlEstimator, aggregation: Aggregation) -> Algorithm {
    let grpo = Preset::Grpo.algorithm();
    Algorithm {
        surrogate: Surrogate { form, dual_clip: Some(3.0), ..grpo.surrogate },
        aggregation,
        norm_length: Some(7.0),
        kl: KlPenalty { coef: 0.3, estimator, ..grpo.kl },
        importance: Some(ImportanceCorrection { level: ImportanceLevel::Token, cap: 1.2 }),
        ..grpo
    }
}

/// Every combination, chosen by one number.
fn any_algorithm(choice: usize) -> Algorithm {
    let (form, rest) = (FORMS[choice % 3], choice / 3);
    algorithm(form, ESTIMATORS[rest % 4], AGGREGATIONS[rest / 4 % 4])
}

/// The loss and its gradient `[B, T]` with respect to logp, by autograd, with given weights.
fn loss_and_gradient(
    algorithm: &Algorithm,
    tokens: &Tokens,
    weights: &TokenWeights,
) -> (f64, Tensor) {
    let leaf = tokens.logp.detach().set_requires_grad(true);
    let with_leaf = |logp: &Tensor| Tokens {
        logp: logp.shallow_clone(),
        old_logp: tokens.old_logp.shallow_clone(),
        ref_logp: tokens.ref_logp.as_ref().map(Tensor::shallow_clone),
        sampler_logp: tokens.sampler_logp.as_ref().map(Tensor::shallow_clone),
        advantages: tokens.advantages.shallow_clone(),
        mask: tokens.mask.shallow_clone(),
    };
    let masked = with_leaf(&leaf).masked().unwrap();
    let task = weights.sum(&algorithm.task(&masked).attach(&masked.logp)).unwrap();
    let kl = weights.sum(&algorithm.kl(&masked).unwrap().attach(&masked.logp)).unwrap();
    let loss = task + kl * algorithm.kl_loss_coef();
    let gradient = Tensor::run_backward(&[&loss], &[&leaf], false, false).remove(0);
    (loss.double_value(&[]), gradient)
}

fn weights(algorithm: &Algorithm, mask: &Tensor) -> TokenWeights {
    TokenWeights::new(algorithm.aggregation, algorithm.norm_length, mask).unwrap()
}

#[track_caller]
fn assert_same(left: &Tensor, right: &Tensor, what: &str) {
    assert_eq!(left.size(), right.size(), "{what}");
    let difference = (left - right).abs().max().double_value(&[]);
    assert!(difference < 1e-12, "{what}: {difference:e}\n{left}\n{right}");
}

/// The tokens with every tensor changed alike.
fn map(tokens: &Tokens, change: impl Fn(&Tensor) -> Tensor) -> Tokens {
    Tokens {
        logp: change(&tokens.logp),
        old_logp: change(&tokens.old_logp),
        ref_logp: tokens.ref_logp.as_ref().map(&change),
        sampler_logp: tokens.sampler_logp.as_ref().map(&change),
        advantages: change(&tokens.advantages),
        mask: change(&tokens.mask),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn padding_changes_nothing(seed in any::<u64>(), choice in 0_usize..48) {
        let (tokens, algorithm) = (tokens(seed), any_algorithm(choice));
        let (loss, gradient) = loss_and_gradient(&algorithm, &tokens, &weights(&algorithm, &tokens.mask));
        // Two more columns and a row without a token.
        let padded = map(&tokens, |tensor| tensor.constant_pad_nd([0, 2, 0, 1]));
        let (padded_loss, padded_gradient) =
            loss_and_gradient(&algorithm, &padded, &weights(&algorithm, &padded.mask));
        assert_close(padded_loss, loss, 1e-12, 1.0, "loss");
        let size = gradient.size();
        let part = padded_gradient.narrow(0, 0, size[0]).narrow(1, 0, size[1]);
        assert_same(&part, &gradient, "gradient");
        let outside = padded_gradient.abs().sum(Kind::Double) - part.abs().sum(Kind::Double);
        assert_close(outside.double_value(&[]), 0.0, 1e-12, 1.0, "gradient of the padding");
    }

    #[test]
    fn row_order_changes_nothing(seed in any::<u64>(), choice in 0_usize..48) {
        let (tokens, algorithm) = (tokens(seed), any_algorithm(choice));
        let (loss, gradient) = loss_and_gradient(&algorithm, &tokens, &weights(&algorithm, &tokens.mask));
        let turned = map(&tokens, |tensor| tensor.flip([0]));
        let (turned_loss, turned_gradient) =
            loss_and_gradient(&algorithm, &turned, &weights(&algorithm, &turned.mask));
        assert_close(turned_loss, loss, 1e-12, 1.0, "loss");
        assert_same(&turned_gradient.flip([0]), &gradient, "gradient");
    }

    #[test]
    fn a_micro_batch_split_changes_nothing(seed in any::<u64>(), choice in 0_usize..48) {
        let (tokens, algorithm) = (tokens(seed), any_algorithm(choice));
        let whole = weights(&algorithm, &tokens.mask);
        let (loss, gradient) = loss_and_gradient(&algorithm, &tokens, &whole);
        let size = tokens.logp.size();
        let (mut sum, mut parts) = (0.0, Vec::new());
        let mut start = 0;
        while start < size[0] {
            let count = (1 + (seed as i64 + start).rem_euclid(3)).min(size[0] - start);
            let rows = map(&tokens, |tensor| tensor.narrow(0, start, count));
            let part = loss_and_gradient(&algorithm, &rows, &whole.micro_batch(start, count, size[1]));
            sum += part.0;
            parts.push(part.1);
            start += count;
        }
        assert_close(sum, loss, 1e-12, 1.0, "loss");
        assert_same(&Tensor::cat(&parts, 0), &gradient, "gradient");
    }

    #[test]
    fn what_is_masked_out_changes_nothing(seed in any::<u64>(), choice in 0_usize..48) {
        let (tokens, algorithm) = (tokens(seed), any_algorithm(choice));
        let weights = weights(&algorithm, &tokens.mask);
        let (loss, gradient) = loss_and_gradient(&algorithm, &tokens, &weights);
        for garbage in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
            let spoil = |tensor: &Tensor| tensor.where_scalarother(&tokens.mask, garbage);
            let spoilt = Tokens {
                logp: spoil(&tokens.logp),
                old_logp: spoil(&tokens.old_logp),
                ref_logp: tokens.ref_logp.as_ref().map(spoil),
                sampler_logp: tokens.sampler_logp.as_ref().map(spoil),
                advantages: spoil(&tokens.advantages),
                mask: tokens.mask.shallow_clone(),
            };
            let (spoilt_loss, spoilt_gradient) = loss_and_gradient(&algorithm, &spoilt, &weights);
            prop_assert_eq!(spoilt_loss, loss);
            assert_same(&spoilt_gradient, &gradient, "gradient");
        }
    }

    #[test]
    fn an_empty_mask_gives_zero(seed in any::<u64>(), choice in 0_usize..48) {
        let (mut tokens, algorithm) = (tokens(seed), any_algorithm(choice));
        tokens.mask = tokens.mask.zeros_like();
        let (loss, gradient) = loss_and_gradient(&algorithm, &tokens, &weights(&algorithm, &tokens.mask));
        prop_assert_eq!(loss, 0.0);
        prop_assert_eq!(gradient.abs().sum(Kind::Double).double_value(&[]), 0.0);
    }

    /// d/dlogp of every surrogate at ratio 1 is −A times the token's weight.
    #[test]
    fn at_ratio_one_every_surrogate_is_the_plain_policy_gradient(seed in any::<u64>(), choice in 0_usize..48) {
        let (mut tokens, mut algorithm) = (tokens(seed), any_algorithm(choice));
        tokens.old_logp = tokens.logp.shallow_clone();
        algorithm.kl.coef = 0.0;
        algorithm.importance = None;
        let weights = weights(&algorithm, &tokens.mask);
        let (_, gradient) = loss_and_gradient(&algorithm, &tokens, &weights);
        let plain = -&tokens.advantages * weights.per_token(Kind::Double);
        assert_same(&gradient, &plain, "gradient");
    }

    /// At π = π_ref the gradients of k2 and k3 vanish; that of k1 does not.
    #[test]
    fn at_the_reference_policy_k2_and_k3_have_no_gradient(seed in any::<u64>()) {
        let tokens = tokens(seed);
        for estimator in ESTIMATORS {
            for gradient in [KlGradient::Own, KlGradient::K2] {
                let penalty = KlPenalty { estimator, gradient, ..Preset::Grpo.algorithm().kl };
                let term = penalty.term(&tokens.logp, &tokens.logp);
                let largest = term.slope.abs().max().double_value(&[]);
                let own_k1 = estimator == KlEstimator::K1 && gradient == KlGradient::Own;
                prop_assert_eq!(largest, if own_k1 { 1.0 } else { 0.0 });
                prop_assert_eq!(term.value.abs().max().double_value(&[]), 0.0);
            }
        }
    }

    /// Advantages of a group sum to 0; Dr.GRPO's are (G − 1)/G of the leave-one-out ones; groups may
    /// come in any order and size; a constant group has none.
    #[test]
    fn advantages_within_groups(seed in any::<u64>(), rows in 2_usize..20) {
        common::one_thread();
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let labels: Vec<u8> = (0..rows).map(|_| random.random_range(0..4)).collect();
        let rewards: Vec<f64> = labels
            .iter()
            .map(|label| if *label == 0 { 0.1 } else { random.random_range(-1.0..1.0) })
            .collect();
        let tensor = Tensor::from_slice(&rewards);
        let index = GroupIndex::new(&labels, &tensor);
        let numbers = |tensor: Tensor| Vec::<f64>::try_from(tensor).unwrap();
        let (grpo, dr_grpo, rloo) = (
            numbers(index.grpo(&tensor, GRPO_EPSILON)),
            numbers(index.dr_grpo(&tensor)),
            numbers(index.rloo(&tensor)),
        );
        for label in 0..4 {
            let members: Vec<usize> = (0..rows).filter(|row| labels[*row] == label).collect();
            let size = members.len() as f64;
            for advantages in [&grpo, &dr_grpo, &rloo] {
                let sum: f64 = members.iter().map(|row| advantages[*row]).sum();
                assert_close(sum, 0.0, 1e-9, 1.0, "sum of a group");
            }
            let total: f64 = members.iter().map(|row| rewards[*row]).sum();
            for row in members {
                if label == 0 || size < 2.0 {
                    prop_assert_eq!((grpo[row], dr_grpo[row], rloo[row]), (0.0, 0.0, 0.0));
                } else {
                    let others = (total - rewards[row]) / (size - 1.0);
                    assert_close(rloo[row], rewards[row] - others, 1e-12, 1.0, "rloo");
                    let shrunk = rloo[row] * (size - 1.0) / size;
                    assert_close(dr_grpo[row], shrunk, 1e-12, 1.0, "dr_grpo");
                }
            }
        }
        // Reversed rows give reversed advantages.
        let reversed: Vec<u8> = labels.iter().rev().copied().collect();
        let turned = tensor.flip([0]);
        let again = numbers(GroupIndex::new(&reversed, &turned).grpo(&turned, GRPO_EPSILON));
        for (left, right) in again.iter().rev().zip(&grpo) {
            assert_close(*left, *right, 1e-9, right.abs().max(1.0), "reversed");
        }
    }

    /// The slopes that `logit_gradient` takes back to the logits, against autograd through
    /// log_softmax, with −∞ logits of actions that were not taken.
    #[test]
    fn logit_gradients_in_closed_form(seed in any::<u64>(), temperature in 0.3_f64..3.0) {
        common::one_thread();
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        const ROWS: i64 = 5;
        const CHOICES: i64 = 7;
        let actions: Vec<i64> = (0..ROWS).map(|_| random.random_range(0..CHOICES)).collect();
        let logits: Vec<f64> = (0..ROWS * CHOICES)
            .map(|at| {
                let taken = actions[(at / CHOICES) as usize] == at % CHOICES;
                if !taken && random.random_bool(0.2) { f64::NEG_INFINITY } else { random.random_range(-5.0..5.0) }
            })
            .collect();
        let mut row = || -> Tensor {
            Tensor::from_slice(&(0..ROWS).map(|_| random.random_range(-1.0..1.0)).collect::<Vec<f64>>())
        };
        let (slope, entropy_slope, ref_logp) = (row(), row(), row() - 1.0);
        let logits = Tensor::from_slice(&logits).reshape([ROWS, CHOICES]).set_requires_grad(true);
        let actions = Tensor::from_slice(&actions);
        let log_probs = log_probs(&logits, temperature);
        let logp = gather(&log_probs, &actions).unwrap();
        let kl = Preset::Grpo.algorithm().kl.term(&logp, &ref_logp);
        let loss = (&logp * &slope).sum(Kind::Double)
            + kl.attach(&logp).sum(Kind::Double)
            + (entropy(&log_probs) * &entropy_slope).sum(Kind::Double);
        let expected = Tensor::run_backward(&[loss], &[&logits], false, false).remove(0);
        let found = logit_gradient(
            &log_probs.detach(), &actions, &(slope + kl.slope), Some(&entropy_slope), temperature,
        ).unwrap();
        prop_assert_eq!(found.isfinite().all().int64_value(&[]), 1);
        // The slope of k3 may be as large as e²⁰.
        let scale = expected.abs().max().clamp_min(1.0);
        assert_same(&(found / &scale), &(expected / scale), "logits");
    }

    /// float32 stays within 1e-5 of float64 on the same float32 inputs, relative to the sum of the
    /// absolute terms: log-probabilities down to −60, ratios up to the clamp, |x| down to 1e-6.
    #[test]
    fn float32_is_close_to_float64(seed in any::<u64>(), choice in 0_usize..48) {
        common::one_thread();
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let algorithm = any_algorithm(choice);
        const SHAPE: [i64; 2] = [4, 8];
        let mut numbers = |of: &mut dyn FnMut(&mut ChaCha8Rng) -> f64| -> Tensor {
            let numbers: Vec<f32> = (0..32).map(|_| of(&mut random) as f32).collect();
            Tensor::from_slice(&numbers).reshape(SHAPE)
        };
        // Differences of every size from 1e-6 up to beyond the clamp.
        let mut difference = |random: &mut ChaCha8Rng| {
            let size = 10_f64.powf(random.random_range(-6.0..1.35));
            if random.random() { size } else { -size }
        };
        let logp = numbers(&mut |random| -60_f64 * random.random::<f64>().powi(3));
        let single = Tokens {
            old_logp: &logp - numbers(&mut difference),
            ref_logp: Some(&logp - numbers(&mut difference)),
            sampler_logp: Some(&logp - numbers(&mut difference)),
            advantages: numbers(&mut |random| random.random_range(-2.0..2.0)),
            mask: numbers(&mut |random| f64::from(random.random_bool(0.8))).ne(0.0),
            logp,
        };
        let double = map(&single, |tensor| {
            if tensor.kind() == Kind::Bool { tensor.shallow_clone() } else { tensor.to_kind(Kind::Double) }
        });
        let (single, double) = (single.masked().unwrap(), double.masked().unwrap());
        let terms = |tokens: &Tokens| [algorithm.task(tokens), algorithm.kl(tokens).unwrap()];
        let weights = weights(&algorithm, &single.mask);
        for (single, double) in terms(&single).into_iter().zip(terms(&double)) {
            for (single, double) in [(single.value, double.value), (single.slope, double.slope)] {
                let scale = weights.sum(&double.abs()).unwrap().double_value(&[]);
                let found = weights.sum(&single).unwrap().double_value(&[]);
                let expected = weights.sum(&double).unwrap().double_value(&[]);
                assert_close(found, expected, 1e-5, scale, "float32");
            }
        }
    }
}

#[test]
fn entropy_in_float32_is_close_to_float64() {
    common::one_thread();
    let mut random = ChaCha8Rng::seed_from_u64(1);
    let logits: Vec<f32> = (0..64 * 1000).map(|_| random.random_range(-60.0..0.0)).collect();
    let logits = Tensor::from_slice(&logits).reshape([64, 1000]);
    let single = entropy(&log_probs(&logits, 1.0)).to_kind(Kind::Double);
    let double = entropy(&log_probs(&logits.to_kind(Kind::Double), 1.0));
    let error = ((single - &double).abs() / double).max().double_value(&[]);
    assert!(error < 1e-5, "{error:e}");
}

/// k3 and its slope where the naive forms cancel: x²/2 − x³/6, and x − x²/2, to float32's own
/// precision, token by token.
#[test]
fn k3_is_exact_near_zero_in_float32() {
    for x in [1e-6_f64, -1e-6, 1e-4, -1e-4, 1e-3, -1e-3, 0.1, -0.1, 0.4999, 0.5001, -0.5001, 3.0] {
        let penalty = Preset::Grpo.algorithm().kl;
        let logp = Tensor::from_slice(&[x as f32]);
        let term = penalty.term(&logp, &logp.zeros_like());
        let x = f64::from(x as f32);
        let (value, slope) = ((-x).exp_m1() + x, -(-x).exp_m1());
        // By its series where even float64 cancels.
        let value =
            if x.abs() < 1e-3 { x * x / 2.0 * (1.0 - x / 3.0 * (1.0 - x / 4.0)) } else { value };
        assert_close(term.value.double_value(&[0]), value, 3e-7, value, "value");
        assert_close(term.slope.double_value(&[0]), slope, 3e-7, slope.abs(), "slope");
    }
    // And in float64 across the seam of series and closed form.
    for x in [0.499_999_f64, 0.500_001, -0.499_999, -0.500_001] {
        let penalty = Preset::Grpo.algorithm().kl;
        let logp = Tensor::from_slice(&[x]);
        let found = penalty.term(&logp, &logp.zeros_like()).value.double_value(&[0]);
        let value = (-x).exp_m1() + x;
        assert_close(found, value, 1e-14, value, "value");
    }
}

#[test]
fn an_infinite_logit_adds_nothing_to_the_entropy() {
    let logits = Tensor::from_slice(&[0.0, f64::NEG_INFINITY, 0.0]).set_requires_grad(true);
    let found = entropy(&log_probs(&logits, 1.0));
    assert_close(found.double_value(&[]), 2_f64.ln(), 1e-15, 1.0, "entropy");
    let gradient = Tensor::run_backward(&[found], &[&logits], false, false).remove(0);
    assert_eq!(Vec::<f64>::try_from(gradient).unwrap(), [0.0, 0.0, 0.0]);
}

#[test]
fn surrogates_by_hand() {
    let row = |numbers: &[f64]| Tensor::from_slice(numbers).unsqueeze(0);
    let ratios = [1.5_f64, 1.5, 0.5, 0.5, 5.0];
    let advantages = row(&[1.0, -1.0, 1.0, -1.0, -1.0]);
    let logp = row(&ratios.map(f64::ln));
    let (old, mask) = (logp.zeros_like(), logp.ones_like().to_kind(Kind::Bool));
    let ppo = Surrogate { dual_clip: Some(3.0), ..Preset::Grpo.algorithm().surrogate };
    let numbers = |tensor: &Tensor| Vec::<f64>::try_from(tensor.squeeze_dim(0)).unwrap();
    let check = |surrogate: &Surrogate, value: [f64; 5], slope: [f64; 5]| {
        let term = surrogate.term(&logp, &old, &advantages, &mask);
        for (found, expected) in numbers(&term.value).iter().zip(value) {
            assert_close(*found, expected, 1e-12, 1.0, "value");
        }
        for (found, expected) in numbers(&term.slope).iter().zip(slope) {
            assert_close(*found, expected, 1e-12, 1.0, "slope");
        }
        numbers(&surrogate.is_clipped(&term, &logp, &advantages).to_kind(Kind::Double))
    };
    // max(−A r, −A clip(r, .8, 1.2)), at most 3 where A < 0; the slope is −A r unless it is cut.
    let clipped = check(&ppo, [-1.2, 1.5, -0.5, 0.8, 3.0], [0.0, 1.5, -0.5, 0.0, 0.0]);
    assert_eq!(clipped, [1.0, 0.0, 0.0, 1.0, 1.0]);
    // −A clip(r) log r, with slope −A clip(r).
    let weights = [-1.2, 1.2, -0.8, 0.8, 1.2];
    let values: [f64; 5] = std::array::from_fn(|t| weights[t] * ratios[t].ln());
    let cispo = Surrogate { form: SurrogateForm::Cispo, ..ppo };
    assert_eq!(check(&cispo, values, weights), [0.0; 5]);
    // The ratio of the row is the geometric mean: (1.5² · .5² · 5)^(1/5) = 2.8125^.2 = 1.2297.
    let r = 2.8125_f64.powf(0.2);
    let gspo = Surrogate { form: SurrogateForm::Gspo, clip_high: 0.3, ..ppo };
    check(&gspo, [-r, r, -r, r, r], [-r, r, -r, r, r]);
}

#[test]
fn weights_by_hand() {
    // Lengths 2, 0 and 1 of 3 columns: two rows, three tokens.
    let mask = Tensor::from_slice(&[1_i64, 0, 1, 0, 0, 0, 1, 0, 0]).reshape([3, 3]);
    let losses = Tensor::from_slice(&[1.0, 9.0, 3.0, 9.0, 9.0, 9.0, 5.0, 9.0, 9.0]).reshape([3, 3]);
    for (aggregation, expected) in [
        (Aggregation::TokenMean, 9.0 / 3.0),
        (Aggregation::SeqMeanTokenMean, (2.0 + 5.0) / 2.0),
        (Aggregation::SeqMeanTokenSum, (4.0 + 5.0) / 2.0),
        (Aggregation::SeqMeanTokenSumNorm, (4.0 + 5.0) / 2.0 / 10.0),
    ] {
        let weights = TokenWeights::new(aggregation, Some(10.0), &mask).unwrap();
        assert_close(weights.sum(&losses).unwrap().double_value(&[]), expected, 1e-15, 1.0, "sum");
    }
    assert!(TokenWeights::new(Aggregation::SeqMeanTokenSumNorm, None, &mask).is_err());
    assert!(TokenWeights::new(Aggregation::TokenMean, None, &mask.select(0, 0)).is_err());
    let weights = TokenWeights::new(Aggregation::TokenMean, None, &mask).unwrap();
    assert!(weights.sum(&losses.narrow(1, 0, 2)).is_err());
}

/// Two sampled tokens with an observation between them, γ = 1/2, λ = 1/2, rewards 1 and 2, values 4
/// and 6: δ₂ = 2 − 6 = −4, δ₁ = 1 + 6/2 − 4 = 0, A₁ = 0 + ¼·(−4) = −1; returns A + V.
#[test]
fn returns_skip_observation_tokens() {
    let row = |numbers: &[f64]| Tensor::from_slice(numbers).unsqueeze(0);
    let mask = row(&[1.0, 0.0, 1.0]);
    let found = gae(&row(&[1.0, 7.0, 2.0]), &row(&[4.0, 9.0, 6.0]), &mask, 0.5, 0.5).unwrap();
    assert_same(&found.advantages, &row(&[-1.0, 0.0, -4.0]), "advantages");
    assert_same(&found.returns, &row(&[3.0, 0.0, 2.0]), "returns");
    let found = discounted_returns(&row(&[1.0, 7.0, 2.0]), &mask, 0.5).unwrap();
    assert_same(&found, &row(&[2.0, 0.0, 2.0]), "discounted");
    let found = on_last_token(&Tensor::from_slice(&[3.0]), &row(&[1.0, 1.0, 0.0])).unwrap();
    assert_same(&found, &row(&[0.0, 3.0, 0.0]), "on the last sampled token");
}

#[test]
fn whitened_numbers_have_mean_zero_and_variance_one() {
    let row = |numbers: &[f64]| Tensor::from_slice(numbers).unsqueeze(0);
    // Mean 2 and unbiased variance 1 over the mask.
    let found = whiten(&row(&[1.0, 50.0, 2.0, 3.0]), &row(&[1.0, 0.0, 1.0, 1.0])).unwrap();
    let expected = row(&[-1.0, 0.0, 0.0, 1.0]);
    assert!((found - expected).abs().max().double_value(&[]) < 1e-7);
    for (values, mask) in
        [([5.0, 5.0, 5.0], [1.0; 3]), ([5.0, 1.0, 2.0], [1.0, 0.0, 0.0]), ([5.0; 3], [0.0; 3])]
    {
        let found = whiten(&row(&values), &row(&mask)).unwrap();
        assert_eq!(found.abs().max().double_value(&[]), 0.0);
    }
}

#[test]
fn missing_rewards_are_excluded_or_refused() {
    let rewards = Tensor::from_slice(&[1.0, f64::NAN, 3.0, f64::NAN]);
    let index = GroupIndex::new(&["a", "a", "a", "b"], &rewards);
    let numbers = |tensor: Tensor| Vec::<f64>::try_from(tensor).unwrap();
    assert_eq!(numbers(index.dr_grpo(&rewards)), [-1.0, 0.0, 1.0, 0.0]);
    assert_eq!(numbers(index.rloo(&rewards)), [-2.0, 0.0, 2.0, 0.0]);
    assert_eq!(numbers(index.variance(&rewards)), [2.0, 2.0, 2.0, 0.0]);
    let error = require_rewards(&rewards).unwrap_err().to_string();
    assert!(error.contains("NaN in row 1"), "{error}");
    assert!(require_rewards(&Tensor::from_slice(&[1.0, 2.0])).is_ok());
}

/// In float32 eight rewards of 0.1 have a standard deviation of 8e-9, and no advantage.
#[test]
fn equal_rewards_have_no_advantage_in_float32() {
    let rewards = Tensor::from_slice(&[0.1_f32; 8]);
    let index = GroupIndex::new(&[0; 8], &rewards);
    assert_eq!(index.grpo(&rewards, GRPO_EPSILON).abs().max().double_value(&[]), 0.0);
    assert_eq!(index.variance(&rewards).abs().max().double_value(&[]), 0.0);
}

#[test]
fn penalties_by_hand() {
    let penalty = OverlongPenalty { limit: 20.0, buffer: 4.0, factor: 0.5 };
    let lengths = Tensor::from_slice(&[3.0, 16.0, 17.0, 20.0, 25.0]);
    let found = Vec::<f64>::try_from(penalty.penalty(&lengths)).unwrap();
    assert_eq!(found, [0.0, 0.0, -0.125, -0.5, -0.5]);

    // x = 1 on the first token, masked on the second: 5 − 0.1·k2(1) = 4.95.
    let row = |numbers: &[f64]| Tensor::from_slice(numbers).unsqueeze(0);
    let kl = KlPenalty { estimator: KlEstimator::K2, ..Preset::Grpo.algorithm().kl };
    let (old, reference, mask) = (row(&[-1.0, f64::NAN]), row(&[-2.0, 0.0]), row(&[1.0, 0.0]));
    let found = rewards_with_kl(&row(&[5.0, 3.0]), &old, &reference, &mask, &kl, 0.1);
    assert_same(&found, &row(&[4.95, 0.0]), "rewards");
    assert_close(mean_kl(&old, &reference, &mask, &kl).double_value(&[]), 0.5, 1e-15, 1.0, "mean");

    // KL twice the target: the error 1 counts as 0.2, over 64 of 1,000 trajectories.
    let mut adaptive = AdaptiveKl { coef: 0.1, target: 0.05, horizon: 1000.0 };
    adaptive.update(0.1, 64);
    assert_close(adaptive.coef, 0.1 * (1.0 + 0.2 * 0.064), 1e-15, 1.0, "coef");
    adaptive.update(0.0475, 1000);
    assert_close(adaptive.coef, 0.10128 * 0.95, 1e-12, 1.0, "coef");
}

#[test]
fn importance_weights_by_hand() {
    let row = |numbers: &[f64]| Tensor::from_slice(numbers).unsqueeze(0);
    let old = row(&[0.5_f64.ln(), 0.9_f64.ln(), f64::NAN]);
    let sampler = row(&[0.1_f64.ln(), 1.0_f64.ln(), 0.0]);
    let mask = row(&[1.0, 1.0, 0.0]);
    let weights = |level| ImportanceCorrection { level, cap: 2.0 }.weights(&old, &sampler, &mask);
    assert_same(&weights(ImportanceLevel::Token), &row(&[2.0, 0.9, 0.0]), "token");
    // 5 · 0.9 = 4.5, capped.
    assert_same(&weights(ImportanceLevel::Sequence), &row(&[2.0, 2.0, 0.0]), "sequence");
    let low = ImportanceCorrection { level: ImportanceLevel::Sequence, cap: 10.0 };
    assert_same(&low.weights(&old, &sampler, &mask), &row(&[4.5, 4.5, 0.0]), "sequence");
}

#[test]
fn a_value_loss_by_hand() {
    let row = |numbers: &[f64]| Tensor::from_slice(numbers).unsqueeze(0);
    let weights = TokenWeights::new(Aggregation::TokenMean, None, &row(&[1.0, 1.0, 0.0])).unwrap();
    // (2 − 0)² = 4 against (1.5 − 0)² clipped: 4. (1 − 2)² = 1 against (.5 − 2)² = 2.25.
    let (values, old, returns) =
        (row(&[2.0, 1.0, 7.0]), row(&[1.0, 0.0, f64::NAN]), row(&[0.0, 2.0, 0.0]));
    let found = value_loss(&values, &old, &returns, Some(0.5), &weights).unwrap();
    assert_close(found.double_value(&[]), 0.5 * (4.0 + 2.25) / 2.0, 1e-15, 1.0, "clipped");
    let found = value_loss(&values, &old, &returns, None, &weights).unwrap();
    assert_close(found.double_value(&[]), 0.5 * (4.0 + 1.0) / 2.0, 1e-15, 1.0, "plain");
}

#[test]
fn presets_are_what_the_papers_say() {
    for preset in Preset::ALL {
        let algorithm = preset.algorithm();
        assert_eq!(algorithm.surrogate.form, SurrogateForm::PpoClip);
        assert_eq!(algorithm.surrogate.clip_low, 0.2);
        assert_eq!(algorithm.surrogate.log_ratio_clamp, Some(20.0));
        assert_eq!(algorithm.entropy_coef, 0.0);
    }
    let grpo = Preset::Grpo.algorithm();
    assert_eq!((grpo.kl.coef, grpo.kl.estimator), (0.001, KlEstimator::K3));
    assert_eq!(grpo.aggregation, Aggregation::SeqMeanTokenMean);
    assert_eq!(Preset::DrGrpo.algorithm().aggregation, Aggregation::SeqMeanTokenSumNorm);
    let dapo = Preset::Dapo.algorithm();
    assert_eq!((dapo.surrogate.clip_high, dapo.aggregation), (0.28, Aggregation::TokenMean));
    let ppo = Preset::Ppo.algorithm();
    assert_eq!((ppo.surrogate.dual_clip, ppo.advantage), (Some(3.0), AdvantageEstimator::Gae));
}

/// GAE without values is an error, not a zero.
#[test]
fn an_algorithm_says_what_it_lacks() {
    let mask = Tensor::ones([2, 3], (Kind::Bool, tch::Device::Cpu));
    let rewards = Tensor::from_slice(&[1.0, 2.0]);
    let batch = Rewards {
        rewards: &rewards,
        token_rewards: None,
        values: None,
        mask: &mask,
        groups: &GroupIndex::new(&[0, 0], &rewards),
    };
    let error = Preset::Ppo.algorithm().advantages(&batch).unwrap_err().to_string();
    assert!(error.contains("values"), "{error}");
    let dr_grpo = Preset::DrGrpo.algorithm().advantages(&batch).unwrap();
    let expected = Tensor::from_slice(&[-0.5, -0.5, -0.5, 0.5, 0.5, 0.5]).reshape([2, 3]);
    assert_same(&dr_grpo, &expected, "advantages");
}
