//! Mutual information and collapse: numbers by hand, laws, scores against plain ones, the alarm.

mod common;

use std::collections::HashMap;
use std::ops::ControlFlow;

use common::{assert_close, fixture, synthetic_batch};
use gradprism::diagnostics::{
    Baseline, CrossPlan, CrossScores, Cusum, Entry, History, JudgeOptions, Marginal, Measured,
    Regime, RowRecord, Sampling, ScoreOptions, Span, ema, offered,
};
use gradprism::log::{Heatmap, Picture, Plane};
use gradprism::objective::{gather, log_probs};
use gradprism::policy::{Policy, PolicyOptions};
use gradprism::rollout::{Content, Trajectory};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use tch::{Kind, Tensor};

fn scores(rows: &[&[f64]], lengths: &[usize], columns: &[usize]) -> CrossScores {
    let contexts: Vec<usize> = (0..rows[0].len()).collect();
    CrossScores::new(&matrix(rows), lengths, columns, &contexts).unwrap()
}

fn matrix(rows: &[&[f64]]) -> Tensor {
    Tensor::from_slice(&rows.concat()).reshape([rows.len() as i64, rows[0].len() as i64])
}

#[test]
fn two_spans_by_hand() {
    // matched: −2 and −6; mixtures: log ½(e^−2 + e^−4) = −2.56622, log ½(e^−9 + e^−6) = −6.64456.
    let scores = scores(&[&[-2.0, -4.0], &[-9.0, -6.0]], &[2, 4], &[0, 1]);
    let (paper, code) = (scores.metrics(Marginal::Paper), scores.metrics(Marginal::Code));
    for metrics in [&paper, &code] {
        // (0.56622 + 0.64456)/2
        assert_close(metrics.mi_seq_estimate, 0.60539, 5e-6, 1.0, "MI of a sequence");
        assert_close(metrics.mi_upper_bound, 2.0_f64.ln(), 1e-15, 1.0, "upper bound");
        assert_close(metrics.conditional_entropy_seq_est, 4.0, 1e-15, 1.0, "H(Z|X)");
        // (1 + 1.5)/2
        assert_close(metrics.conditional_entropy_est, 1.25, 1e-15, 1.0, "H(Z|X) a token");
        assert_eq!(metrics.retrieval.retrieval_accuracy, 1.0);
        assert_eq!(metrics.retrieval.retrieval_chance_level, 0.5);
    }
    // (0.56622/2 + 0.64456/4)/2; its rows lie ±0.060984 around it, each a context of its own:
    // se = √(2/1 · 2 · 0.060984²)/2.
    assert_close(paper.token.mi_estimate, 0.222125, 5e-7, 1.0, "paper");
    assert_close(paper.token.mi_estimate_se.unwrap(), 0.060984, 1e-6, 1.0, "its error");
    assert_close(code.token.mi_estimate, 0.343081, 5e-7, 1.0, "code");
    assert_close(paper.token.mi_zscore, 1.168984, 5e-7, 1.0, "z, paper");
    assert_close(code.token.mi_zscore, 1.601719, 5e-7, 1.0, "z, code");
    assert_close(code.token.marginal_std, 0.213195, 5e-7, 1.0, "marginal std");
    // 0.9·0.213195 + 0.1·0.1
    let mean = ema([code.token.marginal_std, 0.1].into_iter()).unwrap();
    assert_close(mean, 0.201876, 5e-7, 1.0, "EMA");
}

#[test]
fn tied_maxima_share_the_row() {
    // Own context alone on top, tied with one, tied with two, below two that tie.
    let rows: [&[f64]; 4] =
        [&[-1.0, -2.0, -2.0], &[-1.0, -1.0, -2.0], &[-1.0, -1.0, -1.0], &[-2.0, -1.0, -1.0]];
    let retrieval = scores(&rows, &[1; 4], &[0; 4]).metrics(Marginal::Paper).retrieval;
    let expected = (1.0 + 1.0 / 2.0 + 1.0 / 3.0 + 0.0) / 4.0;
    assert_close(retrieval.retrieval_accuracy, expected, 1e-15, 1.0, "first");
    // Among the first two: surely, surely, two of three orders, never.
    let expected = (1.0 + 1.0 + 2.0 / 3.0 + 0.0) / 4.0;
    assert_close(retrieval.accuracy_2, expected, 1e-15, 1.0, "first two");
    assert_eq!(retrieval.accuracy_4, 1.0);

    // Equal contexts are no tie: the best of them counts.
    let equal = CrossScores::new(&matrix(&[&[-1.0, -1.0, -3.0]]), &[1], &[0], &[7, 7, 8]).unwrap();
    let retrieval = equal.metrics(Marginal::Paper).retrieval;
    assert_eq!(retrieval.retrieval_accuracy, 1.0);
    assert_close(retrieval.retrieval_chance_level, 2.0 / 3.0, 1e-15, 1.0, "chance");

    // A policy that does not look at its context is at chance exactly, at every cut.
    let blind = scores(&[&[-3.0; 5], &[-4.0; 5], &[-1.0; 5]], &[2, 3, 1], &[0, 3, 4]);
    for marginal in [Marginal::Paper, Marginal::Code] {
        let metrics = blind.metrics(marginal);
        assert_close(metrics.token.mi_estimate, 0.0, 1e-15, 1.0, "MI");
        let retrieval = metrics.retrieval;
        for above in [
            retrieval.retrieval_above_chance,
            retrieval.above_chance_2,
            retrieval.above_chance_4,
            retrieval.above_chance_8,
        ] {
            assert_close(above, 0.0, 1e-15, 1.0, "above chance");
        }
    }
}

#[test]
fn an_impossible_context_costs_nothing_but_its_share() {
    // π(Z | X_2) = 0: the mixture is half of π(Z | X_1).
    let metrics = scores(&[&[-2.0, f64::NEG_INFINITY]], &[2], &[0]).metrics(Marginal::Paper);
    assert_close(metrics.mi_seq_estimate, 2.0_f64.ln(), 1e-15, 1.0, "MI");
    for (rows, lengths, columns, argument) in [
        (matrix(&[&[f64::NAN, -1.0]]), vec![1], vec![1], "log_likelihood"),
        (matrix(&[&[f64::INFINITY, -1.0]]), vec![1], vec![1], "log_likelihood"),
        (matrix(&[&[f64::NEG_INFINITY, -1.0]]), vec![1], vec![0], "log_likelihood"),
        (matrix(&[&[-1.0, -1.0]]), vec![0], vec![0], "lengths"),
        (matrix(&[&[-1.0, -1.0]]), vec![1], vec![2], "columns"),
        (matrix(&[&[-1.0, -1.0]]), vec![1, 1], vec![0, 0], "log_likelihood"),
    ] {
        let error = CrossScores::new(&rows, &lengths, &columns, &[0, 1]).unwrap_err();
        assert!(error.to_string().starts_with(argument), "{error}");
    }
}

/// Ten spans a context in the exact proportions of a distribution over two outcomes make the estimate
/// exact.
fn exact(distributions: [[usize; 2]; 2]) -> CrossScores {
    let score =
        |context: usize, outcome: usize| (distributions[context][outcome] as f64 / 10.0).ln();
    let mut rows = Vec::new();
    let mut columns = Vec::new();
    for (context, distribution) in distributions.iter().enumerate() {
        for (outcome, count) in distribution.iter().enumerate() {
            for _ in 0..*count {
                rows.push([score(0, outcome), score(1, outcome)]);
                columns.push(context);
            }
        }
    }
    let rows: Vec<&[f64]> = rows.iter().map(|row| row.as_slice()).collect();
    scores(&rows, &vec![1; rows.len()], &columns)
}

#[test]
fn mixing_with_a_template_takes_its_share_of_the_information() {
    // p = [.9, .1], [.1, .9], q = [.5, .5]: I = log 2 − H(p_α).
    let mut whole = None;
    for (alpha, first, expected) in [
        (0.0, 9, 0.368064),
        (0.25, 8, 0.192745),
        (0.5, 7, 0.082283),
        (0.75, 6, 0.020136),
        (1.0, 5, 0.0),
    ] {
        let metrics = exact([[first, 10 - first], [10 - first, first]]).metrics(Marginal::Paper);
        let information = metrics.token.mi_estimate;
        assert_close(information, expected, 5e-7, 1.0, "I of the mixture");
        let whole = *whole.get_or_insert(information);
        assert!(information <= (1.0 - alpha) * whole + 1e-12, "{alpha}: {information}");
        // H(Z) = I(X; Z) + H(Z | X), whatever is mixed.
        let sum = information + metrics.conditional_entropy_est;
        assert_close(metrics.token.reasoning_entropy_est, sum, 1e-12, 1.0, "H(Z)");
    }
    // Convexity in the channel, for any distributions and template.
    let mut random = ChaCha8Rng::seed_from_u64(5);
    for _ in 0..200 {
        let mut pick = || random.random_range(1..10);
        let (p, q, template) = (pick(), pick(), pick());
        let of = |alpha: f64| {
            let mixed =
                |share: usize| ((1.0 - alpha) * share as f64 + alpha * template as f64) / 10.0;
            information(mixed(p), mixed(q))
        };
        for alpha in [0.1, 0.3, 0.5, 0.9] {
            assert!(of(alpha) <= (1.0 - alpha) * of(0.0) + 1e-12, "{p} {q} {template} {alpha}");
        }
        // And the estimate is that information.
        let estimate = exact([[p, 10 - p], [q, 10 - q]]).metrics(Marginal::Paper);
        assert_close(estimate.mi_seq_estimate, of(0.0), 1e-12, 1.0, "estimate");
    }
}

/// I(X; Z) of two equally likely contexts with the probabilities of the first of two outcomes.
fn information(p: f64, q: f64) -> f64 {
    let entropy =
        |p: f64| -> f64 { [p, 1.0 - p].iter().filter(|p| **p > 0.0).map(|p| -p * p.ln()).sum() };
    entropy((p + q) / 2.0) - (entropy(p) + entropy(q)) / 2.0
}

#[test]
fn the_contrastive_loss_is_what_the_information_leaves_of_log_p() {
    let mut random = ChaCha8Rng::seed_from_u64(2);
    for (rows, contexts) in [(4, 4), (12, 3), (7, 5)] {
        let numbers: Vec<f64> =
            (0..rows * contexts).map(|_| random.random_range(-60.0..-5.0)).collect();
        let matrix = Tensor::from_slice(&numbers).reshape([rows as i64, contexts as i64]);
        let columns: Vec<usize> = (0..rows).map(|row| row % contexts).collect();
        let lengths: Vec<usize> = (0..rows).map(|_| random.random_range(1..30)).collect();
        // −log softmax_j(L_ij)[i], by libtorch.
        let own: Vec<i64> = columns.iter().map(|column| *column as i64).collect();
        let own = Tensor::from_slice(&own).unsqueeze(1);
        let loss = -matrix.log_softmax(1, Kind::Double).gather(1, &own, false);
        let loss = loss.mean(Kind::Double).double_value(&[]);
        let signatures: Vec<usize> = (0..contexts).collect();
        let scores = CrossScores::new(&matrix, &lengths, &columns, &signatures).unwrap();
        let information = scores.metrics(Marginal::Paper).mi_seq_estimate;
        assert_close(loss, (contexts as f64).ln() - information, 1e-12, loss, "loss");
    }
}

/// log π(tokens | context) by one unpadded forward of a trajectory made of them.
fn plain_score(policy: &Policy, context: &[i64], tokens: &[i64], mask: &[bool]) -> f64 {
    let trajectory = Trajectory {
        line: 1,
        id: None,
        content: Content::Tokens { prompt_ids: context.to_vec(), response_ids: tokens.to_vec() },
        mask: mask.to_vec(),
        reward: 0.0,
        token_rewards: None,
        old_logprobs: None,
        ref_logprobs: None,
        sampler_logprobs: None,
        values: None,
        reasoning: None,
    };
    let _no_grad = tch::no_grad_guard();
    let logits = policy.response_logits(&trajectory).unwrap();
    let chosen = gather(&log_probs(&logits, 0.7), &Tensor::from_slice(tokens)).unwrap();
    let sampled = Tensor::from_slice(mask).to_kind(chosen.kind());
    (chosen * sampled).sum(Kind::Double).double_value(&[])
}

#[test]
fn cross_scores_are_those_of_single_sequences() {
    common::one_thread();
    let mut batch = synthetic_batch(3, 4);
    // Two spans a row, one of them with an observation inside; a row without any.
    for (index, row) in
        batch.groups.iter_mut().flat_map(|group| &mut group.trajectories).enumerate()
    {
        let length = row.content.len();
        row.reasoning = Some(if index == 5 { vec![] } else { vec![(0, 1), (1, length)] });
        row.mask[0] = true;
    }
    // One prompt in two groups, and one response twice.
    let copy = batch.groups[0].trajectories[0].clone();
    batch.groups[2].trajectories[1] = copy;
    let (offers, counts) = offered(&batch, Sampling::Trajectory, true);
    assert_eq!((counts.trajectories, counts.without_span, counts.valid_trajectories), (12, 1, 11));
    let spans: Vec<Span> = offers.concat();
    assert_eq!(spans.len(), counts.valid_spans);
    let plan = CrossPlan::new(&spans);
    let options = ScoreOptions { temperature: 0.7, token_budget: 64 };
    let cost = plan.cost(options);
    assert!(cost.spans < spans.len() && cost.contexts < spans.len(), "{cost:?}");
    assert_eq!(cost.sequences, cost.spans * cost.contexts);
    assert!(cost.tokens < cost.padded_tokens);

    for (checkpoint, mixes) in [("gpt2.pt", false), ("mixing.pt", true)] {
        let policy =
            Policy::load_without_gradient(&fixture(checkpoint), &PolicyOptions::default()).unwrap();
        // Each context of a column, from the rows that own it.
        let mut known: HashMap<usize, Vec<i64>> = HashMap::new();
        let score = |token_budget: usize| {
            let mut done = 0;
            let options = ScoreOptions { token_budget, ..options };
            let scored = plan
                .score(&policy, options, &mut |sequences| {
                    done += sequences;
                    ControlFlow::Continue(())
                })
                .unwrap()
                .unwrap();
            assert_eq!(done, cost.sequences);
            assert_eq!(scored.mixes_rows, mixes, "{checkpoint}");
            scored.scores
        };
        let found = score(64);
        for (row, span) in spans.iter().enumerate() {
            known.insert(found.column(row), span.context());
        }
        for (row, span) in spans.iter().enumerate() {
            let (tokens, mask) = span.tokens();
            assert_eq!(found.length(row), span.sampled());
            for (column, score) in found.row(row).iter().enumerate() {
                let expected = plain_score(&policy, &known[&column], tokens, mask);
                assert_close(*score, expected, 1e-5, expected.abs().max(1.0), checkpoint);
            }
        }
        // Neither padding nor the size of a batch changes a score.
        for token_budget in [1, 30, 100_000] {
            let other = score(token_budget);
            for row in 0..found.rows() {
                for (left, right) in found.row(row).iter().zip(other.row(row)) {
                    assert_close(*left, *right, 1e-5, right.abs().max(1.0), "another budget");
                }
            }
        }
    }
}

#[test]
fn scoring_stops_where_it_is_told_to() {
    common::one_thread();
    let batch = synthetic_batch(3, 4);
    let (offers, _) = offered(&batch, Sampling::FirstTurn, false);
    let plan = CrossPlan::new(&offers.concat());
    let policy =
        Policy::load_without_gradient(&fixture("gpt2.pt"), &PolicyOptions::default()).unwrap();
    let options = ScoreOptions { temperature: 1.0, token_budget: 1 };
    let mut calls = 0;
    let scored = plan.score(&policy, options, &mut |_| {
        calls += 1;
        if calls == 3 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    assert!(scored.unwrap().is_none());
    assert_eq!(calls, 3);
}

fn measured(mi_estimate: f64, conditional_entropy_est: f64) -> Measured {
    Measured {
        mi_estimate,
        conditional_entropy_est,
        marginal_std: 0.2,
        mi_seq_estimate: 10.0 * mi_estimate,
        marginal_std_seq: 2.0,
    }
}

fn entry(step: i64, measured: Option<Measured>) -> Entry {
    Entry { step, valid_share: if measured.is_some() { 1.0 } else { 0.3 }, measured }
}

const JUDGE: JudgeOptions =
    JudgeOptions { baseline: None, baseline_steps: 3, low: 0.5, min_valid: 0.8 };

#[test]
fn the_regimes_are_the_quadrants_around_the_baseline() {
    let mut history = History::new(Marginal::Paper, Sampling::FirstTurn);
    for (step, mi) in [0.9, 1.0, 1.1].into_iter().enumerate() {
        let regime = history.judge(&JUDGE).regime;
        assert_eq!(regime, None, "before there is a baseline");
        history.push(entry(step as i64, Some(measured(mi, 2.0))));
    }
    let baseline = history.baseline(3).unwrap();
    assert_close(baseline.mi_estimate, 1.0, 1e-12, 1.0, "mean");
    assert_close(baseline.mi_std.unwrap(), 0.1, 1e-12, 1.0, "std");
    for (mi, entropy, regime) in [
        (0.9, 1.9, Regime::Diverse),
        (0.5, 1.0, Regime::Diverse),
        (0.4, 1.9, Regime::TemplateCollapse),
        (-0.1, 3.0, Regime::TemplateCollapse),
        (0.9, 0.5, Regime::Compressed),
        (0.4, 0.5, Regime::LowEntropyCollapse),
    ] {
        history.push(entry(3, Some(measured(mi, entropy))));
        let judgement = history.judge(&JUDGE);
        assert_eq!(judgement.regime, Some(regime), "{mi} {entropy}");
        assert_close(judgement.mi_share.unwrap(), mi, 1e-12, 1.0, "share");
        // (x − 1)/(0.1·√(4/3)), and what falls short of −0.5 of it.
        let standardised = (mi - 1.0) / (0.1 * (4.0_f64 / 3.0).sqrt());
        assert_close(judgement.standardised_mi.unwrap(), standardised, 1e-9, 1.0, "z");
        let cusum = (-standardised - 0.5).max(0.0);
        assert_close(judgement.cusum.unwrap(), cusum, 1e-9, 1.0, "CUSUM");
        assert_eq!(judgement.alarm, cusum > 4.0);
    }
    // Survivors of a format collapse count for nothing.
    history.push(entry(3, Some(measured(1.0, 2.0))));
    let before = history.judge(&JUDGE);
    history.push(entry(4, None));
    let after = history.judge(&JUDGE);
    assert_eq!(after.regime, Some(Regime::FormatCollapse));
    assert_eq!((after.ema, after.standardised_mi), (None, None));
    assert_eq!(after.cusum, before.cusum);
    assert_eq!(history.baseline(3), Some(baseline));
}

#[test]
fn a_state_survives_a_restart_and_a_step_measured_again_takes_its_place() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("state.json");
    let load = || History::load(&path, "diagnostics.state", Marginal::Paper, Sampling::FirstTurn);
    assert!(load().is_err());
    let series = [0.9, 1.0, 1.1, 0.2, 0.1];
    let mut whole = History::new(Marginal::Paper, Sampling::FirstTurn);
    for (step, mi) in series.into_iter().enumerate() {
        whole.push(entry(step as i64, Some(measured(mi, 2.0))));
    }
    // The same, with a restart after every step.
    History::new(Marginal::Paper, Sampling::FirstTurn).save(&path).unwrap();
    for (step, mi) in series.into_iter().enumerate() {
        let mut history = load().unwrap();
        history.push(entry(step as i64, Some(measured(mi, 2.0))));
        history.save(&path).unwrap();
    }
    let mut history = load().unwrap();
    assert_eq!(history, whole);
    assert_eq!(history.judge(&JUDGE), whole.judge(&JUDGE));
    assert!(history.judge(&JUDGE).alarm);
    // Resumed from step 3: what came after is replaced.
    assert_eq!(history.held_from(3), 2);
    history.push(entry(3, Some(measured(1.0, 2.0))));
    assert_eq!(history.last_step(), Some(3));
    assert!(!history.judge(&JUDGE).alarm);
    // Nothing but the file itself is left in the folder.
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    // Numbers of another kind are refused.
    let other = History::load(&path, "diagnostics.state", Marginal::Code, Sampling::FirstTurn);
    assert!(other.unwrap_err().to_string().contains("diagnostics.state"));
    std::fs::write(&path, "{\"format\": 1}").unwrap();
    assert!(load().unwrap_err().to_string().contains("expected a state.json"));
    // A folder that does not exist: an error, and nothing written.
    assert!(whole.save(&folder.path().join("nowhere/state.json")).is_err());
}

#[test]
fn a_baseline_without_information_or_spread_judges_nothing() {
    assert_eq!(Baseline::of(&[]), None);
    let one = Baseline::of(&[measured(1.0, 2.0)]).unwrap();
    assert_eq!((one.mi_std, one.standardised(0.5)), (None, None));
    assert_eq!(one.shares(&measured(0.5, 1.0)), Some((0.5, 0.5)));
    let none = Baseline::of(&[measured(0.0, 2.0), measured(0.0, 2.0)]).unwrap();
    assert_eq!((none.standardised(0.5), none.shares(&measured(0.5, 1.0))), (None, None));
}

/// The color of a pixel, by way of the PNG file.
fn pixel(picture: &Picture, x: usize, y: usize) -> [u8; 3] {
    let png = std::io::Cursor::new(picture.to_png().unwrap());
    let mut reader = png::Decoder::new(png).read_info().unwrap();
    let mut pixels = vec![0; reader.output_buffer_size().unwrap()];
    reader.next_frame(&mut pixels).unwrap();
    let at = (y * picture.width() as usize + x) * 3;
    [pixels[at], pixels[at + 1], pixels[at + 2]]
}

const DARK: [u8; 3] = [20, 60, 120];
const RED: [u8; 3] = [200, 60, 20];
const BLUE: [u8; 3] = [90, 130, 180];

#[test]
fn the_pictures_show_the_matrix_and_the_way() {
    let row = |column, log_likelihood: [f64; 3]| RowRecord {
        step: 0,
        group_id: "g".into(),
        trajectory_id: None,
        line: 1,
        span: (0, 2),
        length: 2,
        column,
        log_likelihood: log_likelihood.to_vec(),
    };
    let rows = [row(0, [-1.0, -5.0, f64::NEG_INFINITY]), row(2, [-9.0, -5.0, -9.0])];
    let picture = Heatmap { rows: &rows }.draw();
    // Cells of 24 pixels from (80, 50). Finite losses per token: 2, 2, 2, so that 4 is white.
    let cell = |row: usize, column: usize| pixel(&picture, 92 + 24 * column, 62 + 24 * row);
    let half = DARK.map(|dark| ((f64::from(dark) + 255.0) / 2.0).round() as u8);
    assert_eq!([cell(0, 0), cell(0, 1), cell(0, 2)], [DARK, half, [255; 3]]);
    assert_eq!([cell(1, 0), cell(1, 1), cell(1, 2)], [half, DARK, half]);
    // The own context is ringed.
    assert_eq!(pixel(&picture, 80, 62), RED);
    assert_eq!(pixel(&picture, 80 + 48, 62 + 24), RED);

    let mut history = History::new(Marginal::Paper, Sampling::FirstTurn);
    history.push(entry(0, Some(measured(1.0, 5.0))));
    history.push(entry(1, Some(measured(0.5, 2.0))));
    let baseline = Baseline::of(&[measured(1.0, 5.0)]);
    let picture = Plane { history: &history, baseline, low: 0.5 }.draw();
    // Axes from (80, 400) to (620, 50), up to 5 and 1.
    assert_eq!(pixel(&picture, 620, 50), BLUE);
    assert_eq!(pixel(&picture, 80 + 540 * 2 / 5, 225), RED);
    // Half way between the steps, and on the line at half of the baseline's entropy.
    assert_eq!(pixel(&picture, (80 + 216 + 620) / 2, 137), BLUE);
    assert_eq!(pixel(&picture, 80 + 270, 380), [40; 3]);

    // An estimate below 0 stands below the axis, and half of the baseline's information above it.
    history.push(entry(1, Some(measured(-1.0, 2.0))));
    let picture = Plane { history: &history, baseline, low: 0.5 }.draw();
    assert_eq!(pixel(&picture, 80 + 216, 400), RED);
    assert_eq!(pixel(&picture, 200, 225), [40; 3]);
    assert_eq!(pixel(&picture, 200, 137), [40; 3]);
    // Of a baseline without information there is no half.
    let baseline = Baseline::of(&[measured(-1.0, 5.0)]);
    let picture = Plane { history: &history, baseline, low: 0.5 }.draw();
    assert_eq!(pixel(&picture, 80 + 270, 380), [255; 3]);
}

/// Standard normal numbers (Box and Muller).
fn normal(random: &mut ChaCha8Rng) -> f64 {
    let (u, v): (f64, f64) = (random.random_range(f64::MIN_POSITIVE..1.0), random.random());
    (-2.0 * u.ln()).sqrt() * (std::f64::consts::TAU * v).cos()
}

/// The steps to an alarm in each of many series whose mean is `shift` standard deviations off, cut at
/// 5,000; with a baseline of so many steps, or the true one.
fn run_lengths(series: u64, shift: f64, baseline_steps: Option<usize>) -> Vec<f64> {
    const CUT: usize = 5000;
    (0..series)
        .map(|seed| {
            let mut random = ChaCha8Rng::seed_from_u64(seed);
            let baseline = baseline_steps.map(|steps| {
                let steps: Vec<Measured> =
                    (0..steps).map(|_| measured(normal(&mut random), 1.0)).collect();
                Baseline::of(&steps).unwrap()
            });
            let mut cusum = Cusum::default();
            let alarm = (1..=CUT).find(|_| {
                let value = normal(&mut random) + shift;
                cusum.push(match &baseline {
                    Some(baseline) => baseline.standardised(value).unwrap(),
                    None => value,
                });
                cusum.is_alarm()
            });
            alarm.unwrap_or(CUT) as f64
        })
        .collect()
}

/// The numbers of the table in the documentation of [`Cusum`].
#[test]
fn the_false_alarms_of_the_cusum() {
    let mean = |lengths: &[f64]| lengths.iter().sum::<f64>() / lengths.len() as f64;
    let within_50 = |lengths: &[f64]| {
        lengths.iter().filter(|length| **length <= 50.0).count() as f64 / lengths.len() as f64
    };
    // A run length is about exponential: its mean over 2,000 series has a standard error of 2.2 %.
    // Tables (Montgomery, Statistical Quality Control) give 336 for one side, and 8.38 after a shift
    // by one standard deviation.
    let known = run_lengths(2000, 0.0, None);
    assert_close(mean(&known), 336.0, 0.07, 336.0, "in control");
    let shifted = run_lengths(2000, -1.0, None);
    assert_close(mean(&shifted), 8.38, 0.04, 8.38, "shifted");
    // A rise is no alarm.
    assert!(mean(&run_lengths(20, 1.0, None)) > 4900.0);
    // The series with a false alarm within 50 steps; standard errors are about 1 %.
    assert_close(within_50(&known), 0.145, 0.03, 1.0, "known");
    for (steps, expected) in [(50, 0.17), (20, 0.24), (10, 0.28), (5, 0.35)] {
        let lengths = run_lengths(2000, 0.0, Some(steps));
        assert_close(within_50(&lengths), expected, 0.03, 1.0, "estimated");
        // Longer than with a known baseline, in the mean.
        assert!(mean(&lengths) > 500.0, "{steps}: {}", mean(&lengths));
    }
}
