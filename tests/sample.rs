//! Sampling: draws against their distributions, independence of the batch, the key-value cache.

mod common;

use common::{assert_close, fixture};
use gradprism::objective::log_probs;
use gradprism::policy::{
    Dtype, Policy, PolicyKind, PolicyOptions, Sample, SampleRequest, SamplingOptions, StopReason,
};
use gradprism::rollout::{Content, Trajectory};
use gradprism::{Error, Result};
use rand::{Rng, RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use tch::Tensor;

/// One softmax, one token, no truncation.
fn plain() -> SamplingOptions {
    SamplingOptions {
        temperature: 1.0,
        greedy: false,
        top_k: None,
        top_p: 1.0,
        max_tokens: 1,
        stop_tokens: Vec::new(),
        token_budget: 4096,
        use_cache: true,
    }
}

fn load(name: &str, dtype: Dtype) -> Policy {
    common::one_thread();
    Policy::load(&fixture(name), &PolicyOptions { dtype, ..PolicyOptions::default() }).unwrap()
}

/// A bigram model in float64: the next token depends on the last one alone. After token 0 it draws
/// from `probabilities`; tokens beyond them have a logit of −∞.
fn bigram(probabilities: &[f64]) -> Policy {
    let policy = load("sparse.pt", Dtype::Float64);
    let mut logits = vec![f64::NEG_INFINITY; 16];
    for (logit, probability) in logits.iter_mut().zip(probabilities) {
        *logit = probability.ln();
    }
    set_row(&policy, 0, &logits);
    policy
}

fn set_row(policy: &Policy, row: i64, logits: &[f64]) {
    let table = &policy.parameters()[0].tensor;
    tch::no_grad(|| table.select(0, row).copy_(&Tensor::from_slice(logits)));
}

fn stream(row: usize) -> ChaCha8Rng {
    ChaCha8Rng::seed_from_u64(1000 + row as u64)
}

/// Row i has stream i.
fn sample(policy: &Policy, contexts: &[&[i64]], options: &SamplingOptions) -> Result<Vec<Sample>> {
    let requests = contexts
        .iter()
        .enumerate()
        .map(|(row, context)| SampleRequest { context, generator: stream(row) })
        .collect();
    policy.sample(requests, options, &mut |_, _| false)
}

/// The first tokens of so many rows after token 0.
fn draws(policy: &Policy, count: usize, options: &SamplingOptions) -> Vec<Sample> {
    sample(policy, &vec![&[0_i64][..]; count], options).unwrap()
}

fn contexts(count: usize, seed: u64) -> Vec<Vec<i64>> {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    (0..count)
        .map(|_| (0..random.random_range(1..9)).map(|_| random.random_range(0..16)).collect())
        .collect()
}

fn slices(rows: &[Vec<i64>]) -> Vec<&[i64]> {
    rows.iter().map(Vec::as_slice).collect()
}

fn tokens(samples: &[Sample]) -> Vec<&[i64]> {
    samples.iter().map(|sample| sample.tokens.as_slice()).collect()
}

/// χ² of the first tokens; nothing may fall where the probability is 0.
fn chi_square(samples: &[Sample], probabilities: &[f64]) -> f64 {
    let mut counts = [0.0; 16];
    for sample in samples {
        counts[sample.tokens[0] as usize] += 1.0;
    }
    let total = samples.len() as f64;
    (0..16)
        .map(|token| {
            let expected = total * probabilities.get(token).copied().unwrap_or(0.0);
            if expected == 0.0 {
                assert_eq!(counts[token], 0.0, "token {token} of probability 0 was drawn");
                return 0.0;
            }
            (counts[token] - expected).powi(2) / expected
        })
        .sum()
}

#[test]
fn frequencies_are_those_of_the_softmax() {
    let policy = load("sparse.pt", Dtype::Keep);
    let table = Vec::<f32>::try_from(policy.parameters()[0].tensor.detach().select(0, 0)).unwrap();
    for temperature in [0.5, 1.0, 2.0] {
        let weights: Vec<f64> = table.iter().map(|z| (f64::from(*z) / temperature).exp()).collect();
        let total: f64 = weights.iter().sum();
        let softmax: Vec<f64> = weights.iter().map(|weight| weight / total).collect();
        let samples = draws(&policy, 8000, &SamplingOptions { temperature, ..plain() });
        // The 99.9th percentile at 15 degrees of freedom.
        let chi = chi_square(&samples, &softmax);
        assert!(chi < 37.7, "temperature {temperature}: {chi}");
    }
}

#[test]
fn truncated_frequencies_are_renormalised() {
    let policy = bigram(&[0.1, 0.4, 0.05, 0.25, 0.2]);
    // (options, distribution, the 99.9th percentile of χ² at its degrees of freedom)
    let two = SamplingOptions { top_k: Some(2), ..plain() };
    let three = SamplingOptions { top_p: 0.7, ..plain() };
    // Of the three most likely, /0.85: 0.47 and 0.29 reach 0.6.
    let both = SamplingOptions { top_k: Some(3), top_p: 0.6, ..plain() };
    let pair = [0.0, 0.4 / 0.65, 0.0, 0.25 / 0.65];
    for (options, expected, bound) in [
        (two, &pair[..], 10.83),
        (three, &[0.0, 0.4 / 0.85, 0.0, 0.25 / 0.85, 0.2 / 0.85], 13.82),
        (both, &pair, 10.83),
        (plain(), &[0.1, 0.4, 0.05, 0.25, 0.2], 18.47),
    ] {
        let samples = draws(&policy, 4000, &options);
        let chi = chi_square(&samples, expected);
        assert!(chi < bound, "{options:?}: {chi}");
        for sample in &samples {
            let token = sample.tokens[0] as usize;
            let whole = [0.1_f64, 0.4, 0.05, 0.25, 0.2][token].ln();
            assert_close(sample.logprobs[0], whole, 1e-12, 1.0, "logprob");
            let drawn = expected[token].ln();
            assert_close(sample.sampler_logprobs[0], drawn, 1e-12, 1.0, "sampler logprob");
        }
    }
}

#[test]
fn ties_at_the_edge_stay_for_top_k_and_go_by_id_for_top_p() {
    let policy = bigram(&[0.125, 0.25, 0.125, 0.25, 0.25]);
    let seen = |options: SamplingOptions| {
        let mut seen: Vec<i64> =
            draws(&policy, 500, &options).iter().map(|sample| sample.tokens[0]).collect();
        seen.sort_unstable();
        seen.dedup();
        seen
    };
    assert_eq!(seen(SamplingOptions { top_k: Some(1), ..plain() }), [1, 3, 4]);
    assert_eq!(seen(SamplingOptions { top_k: Some(4), ..plain() }), [0, 1, 2, 3, 4]);
    assert_eq!(seen(SamplingOptions { top_k: Some(99), ..plain() }), [0, 1, 2, 3, 4]);
    assert_eq!(seen(SamplingOptions { top_p: 0.3, ..plain() }), [1, 3]);
    assert_eq!(seen(SamplingOptions { top_p: 1e-9, ..plain() }), [1]);
    // 0.8 is reached by one of the two eighths.
    assert_eq!(seen(SamplingOptions { top_p: 0.8, ..plain() }), [0, 1, 3, 4]);
}

#[test]
fn a_token_is_the_inverse_of_the_cumulated_probabilities() {
    let policy = bigram(&[0.0, 0.25, 0.0, 0.5, 0.25]);
    for (row, sample) in draws(&policy, 300, &plain()).iter().enumerate() {
        let uniform = (stream(row).next_u64() >> 12) as f64 / 2_f64.powi(52);
        let expected = match uniform {
            ..0.25 => 1,
            ..0.75 => 3,
            _ => 4,
        };
        assert_eq!(sample.tokens, [expected], "row {row}: {uniform}");
    }
}

#[test]
fn log_probs_are_those_of_the_finished_sequence() {
    let policy = load("double.pt", Dtype::Keep);
    let contexts = contexts(9, 1);
    let temperature = 0.7;
    let options = SamplingOptions { temperature, max_tokens: 12, token_budget: 60, ..plain() };
    let samples = sample(&policy, &slices(&contexts), &options).unwrap();
    for (context, sample) in contexts.iter().zip(&samples) {
        let length = sample.tokens.len();
        assert_eq!((length, sample.stop), (12, StopReason::Limit));
        let trajectory = Trajectory {
            line: 1,
            id: None,
            content: Content::Tokens {
                prompt_ids: context.clone(),
                response_ids: sample.tokens.clone(),
            },
            mask: vec![true; length],
            reward: 0.0,
            token_rewards: None,
            old_logprobs: None,
            ref_logprobs: None,
            sampler_logprobs: None,
            values: None,
            reasoning: None,
        };
        let batch = policy.batch_logits(&[&trajectory]).unwrap();
        let scores = log_probs(&batch.logits.detach(), temperature);
        for (place, token) in sample.tokens.iter().enumerate() {
            let expected = scores.double_value(&[place as i64, *token]);
            assert_close(sample.logprobs[place], expected, 1e-10, 1.0, "logprob");
        }
        // Nothing was truncated.
        assert_eq!(sample.sampler_logprobs, sample.logprobs);
    }
}

#[test]
fn greedy_takes_the_most_likely_token_of_the_lowest_id() {
    let policy = bigram(&[0.1, 0.1, 0.3, 0.2, 0.3]);
    // After token 2 the most likely is 9.
    set_row(&policy, 2, &std::array::from_fn::<f64, 16, _>(|token| f64::from(token == 9)));
    let options = SamplingOptions { greedy: true, max_tokens: 2, temperature: 2.0, ..plain() };
    let found = &draws(&policy, 1, &options)[0];
    assert_eq!(found.tokens, [2, 9]);
    let roots: f64 = [0.1_f64, 0.1, 0.3, 0.2, 0.3].iter().map(|p| p.sqrt()).sum();
    assert_close(found.logprobs[0], (0.3_f64.sqrt() / roots).ln(), 1e-12, 1.0, "logprob");
    // e^(1/2)/(e^(1/2) + 15)
    let second = 0.5 - (0.5_f64.exp() + 15.0).ln();
    assert_close(found.logprobs[1], second, 1e-12, 1.0, "logprob");
    assert_eq!(found.sampler_logprobs, [0.0, 0.0]);
}

/// 0 → 1 → 2 → … → 15 → 0, for certain.
fn counting() -> Policy {
    let policy = load("sparse.pt", Dtype::Float64);
    for row in 0..16 {
        let logits = |token: usize| if token == (row + 1) % 16 { 0.0 } else { f64::NEG_INFINITY };
        set_row(&policy, row as i64, &std::array::from_fn::<f64, 16, _>(logits));
    }
    policy
}

#[test]
fn rows_end_at_stop_tokens_at_the_callers_word_and_at_the_limit() {
    let policy = counting();
    let options = SamplingOptions { max_tokens: 6, stop_tokens: vec![5], ..plain() };
    let contexts: [&[i64]; 4] = [&[2], &[7, 6], &[8], &[4]];
    let requests = contexts
        .iter()
        .enumerate()
        .map(|(row, context)| SampleRequest { context, generator: stream(row) })
        .collect();
    let mut heard: Vec<Vec<Vec<i64>>> = vec![Vec::new(); 4];
    let found = policy
        .sample(requests, &options, &mut |row, tokens| {
            heard[row].push(tokens.to_vec());
            // Row 3 is ended by both; the stop token comes first.
            row == 1 && tokens.ends_with(&[8, 9]) || row == 3
        })
        .unwrap();
    let ends: Vec<(&[i64], StopReason)> =
        found.iter().map(|sample| (sample.tokens.as_slice(), sample.stop)).collect();
    let expected: [(&[i64], StopReason); 4] = [
        (&[3, 4, 5], StopReason::Token),
        (&[7, 8, 9], StopReason::Text),
        (&[9, 10, 11, 12, 13, 14], StopReason::Limit),
        (&[5], StopReason::Token),
    ];
    assert_eq!(ends, expected);
    assert_eq!(found[0].logprobs, [0.0; 3]);
    // After each token, with all so far.
    for (heard, sample) in heard.iter().zip(&found) {
        let prefixes: Vec<&[i64]> =
            (1..=sample.tokens.len()).map(|n| &sample.tokens[..n]).collect();
        assert_eq!(heard, &prefixes);
    }
}

#[test]
fn a_row_draws_the_same_in_any_batch_order_and_budget() {
    let contexts = contexts(24, 2);
    for (name, dtype) in [
        ("double.pt", Dtype::Keep),
        ("gpt2.pt", Dtype::Keep),
        ("llama.pt", Dtype::Float64),
        ("cached.pt", Dtype::Float64),
        ("cached.pt", Dtype::Keep),
    ] {
        let policy = load(name, dtype);
        let options = SamplingOptions {
            max_tokens: 10,
            stop_tokens: vec![3],
            top_k: Some(12),
            top_p: 0.95,
            ..plain()
        };
        let expected = sample(&policy, &slices(&contexts), &options).unwrap();
        for token_budget in [0, 40, 97] {
            // Row r comes at place (5r + 7) mod 24.
            let order: Vec<usize> = (0..24).map(|place| (5 * place + 7) % 24).collect();
            let requests = order
                .iter()
                .map(|row| SampleRequest { context: &contexts[*row], generator: stream(*row) })
                .collect();
            let options = SamplingOptions { token_budget, ..options.clone() };
            let found = policy.sample(requests, &options, &mut |_, _| false).unwrap();
            let tolerance = if policy.dtype() == tch::Kind::Double { 1e-10 } else { 1e-4 };
            for (row, found) in order.iter().zip(&found) {
                let expected = &expected[*row];
                assert_eq!(found.tokens, expected.tokens, "{name}, row {row}, {token_budget}");
                assert_eq!(found.stop, expected.stop);
                for (found, expected) in found.logprobs.iter().zip(&expected.logprobs) {
                    assert_close(*found, *expected, tolerance, 1.0, name);
                }
            }
        }
        // Streams matter: another seed draws otherwise.
        let requests = contexts
            .iter()
            .map(|context| SampleRequest { context, generator: ChaCha8Rng::seed_from_u64(5) })
            .collect();
        let other = policy.sample(requests, &options, &mut |_, _| false).unwrap();
        assert_ne!(tokens(&other), tokens(&expected));
    }
}

#[test]
fn a_cache_changes_nothing() {
    for (dtype, tolerance) in [(Dtype::Float64, 1e-10), (Dtype::Keep, 1e-4)] {
        let samples = with_and_without_cache(&load("cached.pt", dtype), vec![1, 7], tolerance);
        // Rows left their batch at different times.
        assert!(samples.iter().any(|sample| sample.stop == StopReason::Token));
        assert!(samples.iter().any(|sample| sample.tokens.len() > 4));
    }
}

#[test]
fn the_cache_of_an_exported_model_changes_nothing() {
    let Some(python) = common::python("the_cache_of_an_exported_model_changes_nothing") else {
        return;
    };
    common::one_thread();
    for shape in ["gpt2", "llama"] {
        let folder = tempfile::tempdir().unwrap();
        let Some(checkpoint) = common::export_hf(&python, shape, folder.path()) else { return };
        let policy = Policy::load(&checkpoint, &PolicyOptions::default()).unwrap();
        with_and_without_cache(&policy, (0..30).collect(), 1e-4);
    }
}

fn with_and_without_cache(policy: &Policy, stop_tokens: Vec<i64>, tolerance: f64) -> Vec<Sample> {
    // Some come twice, as those of a group do.
    let mut contexts = contexts(20, 3);
    contexts.extend_from_within(5..12);
    assert!(policy.has_cache());
    let options = SamplingOptions { max_tokens: 16, stop_tokens, ..plain() };
    let without = SamplingOptions { use_cache: false, ..options.clone() };
    let found = sample(policy, &slices(&contexts), &options).unwrap();
    let expected = sample(policy, &slices(&contexts), &without).unwrap();
    assert_eq!(tokens(&found), tokens(&expected));
    assert_ne!(found[5].tokens, found[20].tokens, "of one context");
    for (found, expected) in found.iter().zip(&expected) {
        for (found, expected) in found.logprobs.iter().zip(&expected.logprobs) {
            assert_close(*found, *expected, tolerance, 1.0, "logprob");
        }
    }
    found
}

#[test]
fn a_cache_that_is_not_forwards_is_refused() {
    for (name, dtype) in [
        ("wrong_cache.pt", Dtype::Keep),
        ("wrong_cache.pt", Dtype::Float64),
        ("padding_cache.pt", Dtype::Keep),
        ("padding_cache.pt", Dtype::Float64),
    ] {
        let policy = load(name, dtype);
        // Found with a single row of a single token too, and before anything is drawn.
        for context in [&[3_i64][..], &[3, 1, 4, 1, 5, 9]] {
            let request = SampleRequest { context, generator: stream(0) };
            let error = policy.sample(vec![request], &plain(), &mut |_, _| panic!("drawn"));
            let error = error.err().unwrap().to_string();
            for expected in [name, "forward_cached", "use_cache: false"] {
                assert!(error.contains(expected), "{error}");
            }
        }
        let options = SamplingOptions { use_cache: false, ..plain() };
        assert_eq!(sample(&policy, &[&[3]], &options).unwrap()[0].tokens.len(), 1);
    }
    let other = load("other_cache.pt", Dtype::Keep);
    assert!(!other.has_cache() && !load("gpt2.pt", Dtype::Keep).has_cache());
    assert!(
        matches!(other.warnings(), [text] if text.contains("forward_cached(input_ids: Tensor, use_cache: bool = ...) -> Tensor")),
        "{:?}",
        other.warnings()
    );
    assert_eq!(draws(&other, 2, &plain()).len(), 2);
}

#[test]
fn what_cannot_be_sampled_is_an_error() {
    let policy = load("gpt2.pt", Dtype::Keep);
    let cases: [(SamplingOptions, &[i64], &str); 11] = [
        (SamplingOptions { temperature: 0.0, ..plain() }, &[1], "temperature"),
        (SamplingOptions { temperature: -1.0, ..plain() }, &[1], "temperature"),
        (SamplingOptions { temperature: f64::NAN, ..plain() }, &[1], "temperature"),
        (SamplingOptions { top_k: Some(0), ..plain() }, &[1], "top_k"),
        (SamplingOptions { top_p: 0.0, ..plain() }, &[1], "top_p"),
        (SamplingOptions { top_p: 1.1, ..plain() }, &[1], "top_p"),
        (SamplingOptions { top_p: f64::NAN, ..plain() }, &[1], "top_p"),
        (SamplingOptions { max_tokens: 0, ..plain() }, &[1], "max_tokens"),
        (plain(), &[], "none in row 0"),
        (plain(), &[1, 16], "16 in row 0"),
        (plain(), &[-1], "-1 in row 0"),
    ];
    for (options, context, expected) in cases {
        let error = sample(&policy, &[context], &options).err().unwrap();
        assert!(matches!(&error, Error::Argument { .. }), "{error}");
        assert!(error.to_string().contains(expected), "{error}");
    }
    assert_eq!(sample(&policy, &[], &plain()).unwrap(), []);
    let step = PolicyOptions {
        kind: PolicyKind::Step,
        observation_shape: Some(vec![3]),
        ..PolicyOptions::default()
    };
    let step = Policy::load(&fixture("tabular.pt"), &step).unwrap();
    assert!(sample(&step, &[&[1]], &plain()).err().unwrap().to_string().contains("step policy"));
}

#[test]
fn logits_that_are_not_finite_are_an_error_and_minus_infinity_is_not() {
    let one_of = |value: f64| {
        let mut logits = [0.0; 16];
        logits[11] = value;
        logits
    };
    for logits in [one_of(f64::NAN), one_of(f64::INFINITY), [f64::NEG_INFINITY; 16]] {
        for greedy in [false, true] {
            let policy = counting();
            set_row(&policy, 4, &logits);
            let options = SamplingOptions { greedy, max_tokens: 5, ..plain() };
            // 3 leads to 4, after which nothing can be drawn; the other row is well.
            let error = sample(&policy, &[&[8], &[3]], &options).err().unwrap();
            assert!(matches!(&error, Error::NonFinite { found, .. } if found.is_nan()), "{error}");
            assert!(error.to_string().contains("row 1, token 1"), "{error}");
        }
    }
    let policy = counting();
    set_row(&policy, 0, &one_of(f64::NEG_INFINITY));
    let samples = draws(&policy, 4000, &plain());
    let mut expected = [1.0 / 15.0; 16];
    expected[11] = 0.0;
    // The 99.9th percentile at 14 degrees of freedom.
    assert!(chi_square(&samples, &expected) < 36.2);
}
